// The keyboard.

import { el } from "./dom.js";

const KEYS = [
  ["↑ ↓", "step to the newer or older checkpoint"],
  ["Home End", "the newest, the oldest that is loaded"],
  ["[ ]", "the branch before, the next branch"],
  ["h", "the head"],
  ["← →", "the tab before, the next tab"],
  ["c", "mark for a comparison, then compare"],
  ["f", "fork"],
  ["r", "rewind"],
  ["t l", "tag, label"],
  ["u", "undo"],
  ["/", "search"],
  ["Esc", "close the comparison, take the mark away"],
  ["?", "this list"],
];

/**
 * Listen to the keyboard. Keys typed into a field, in a dialog or with a modifier are not meant for us;
 * arrows scroll where something that scrolls has the focus.
 * @param {Object<string, () => void>} does by the name of the key
 */
export function listenToKeys(does) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const at = event.target;
    // A field of a dialog that was just closed has the focus until the browser draws again.
    if (at.closest?.("input, textarea, select") && !at.closest("dialog")) {
      if (event.key === "Escape") at.blur();
      return;
    }
    const scrolls = event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End";
    if (scrolls && at.closest?.(".panel, .compare, summary")) return;
    const action = does[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

export function showKeys() {
  const dialog = el("dialog", { class: "keys", "aria-label": "Keys", onclose: () => dialog.remove() },
    el("h2", {}, "Keys"),
    el("dl", {}, KEYS.map(([keys, does]) => [el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, does)])),
    el("div", { class: "buttons" }, el("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
