// Light or dark: the choice of the system, until the user chooses.

const REMEMBERED = "holdfast-theme";

export function startTheme() {
  const chosen = remembered();
  if (chosen) document.documentElement.dataset.theme = chosen;
}

export function switchTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const chosen = dark === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(REMEMBERED, chosen);
  } catch {
    // A browser that keeps nothing: the choice holds until the page is left.
  }
}

function remembered() {
  try {
    const found = localStorage.getItem(REMEMBERED);
    return found === "dark" || found === "light" ? found : null;
  } catch {
    return null;
  }
}
