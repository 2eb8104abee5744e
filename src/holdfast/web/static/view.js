// The current view. The address contains all of it, so that back, forward and bookmarks work.

const FIELDS = {
  session: "s", id: "c", tab: "t", other: "with", pane: "p",
  text: "q", status: "status", agent: "agent", tag: "tag",
};
const watchers = [];

/**
 * `id` is null while the head is followed; `other` is what `id` is compared with; `pane` is the one
 * that a narrow screen shows.
 */
export const view = fromAddress();

/** Change the view: a new entry of the history, or with `replace` the same one. */
export function go(changes, { replace = false } = {}) {
  const next = { ...view, ...changes };
  const hash = toAddress(next);
  if (hash !== toAddress(view)) {
    if (replace) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
  }
  become(next);
}

/** @param {(view: Object, before: Object) => void} watcher called with every change */
export function onView(watcher) {
  watchers.push(watcher);
}

export function addressOf(changes) {
  return toAddress({ ...view, ...changes });
}

export function isNarrow() {
  return matchMedia("(max-width: 899px)").matches;
}

export function followAddress() {
  const read = () => become(fromAddress());
  addEventListener("popstate", read);
  addEventListener("hashchange", read);
}

function become(next) {
  const before = { ...view };
  if (Object.keys(FIELDS).every((name) => before[name] === next[name])) return;
  Object.assign(view, next);
  for (const watcher of watchers) watcher(view, before);
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = {};
  for (const [name, key] of Object.entries(FIELDS)) found[name] = given.get(key);
  return found;
}

function toAddress(of) {
  const query = new URLSearchParams();
  for (const [name, key] of Object.entries(FIELDS)) if (of[name]) query.set(key, of[name]);
  return `#${query}`;
}
