// Notices of events, at the edge of the page and for screen readers.

import { el, put } from "./dom.js";

const STAYS = 7000;
const shelf = el("div", { class: "notices", role: "status", "aria-live": "polite" });
const whisper = el("div", { class: "unseen", "aria-live": "polite" });

export function noticeShelf() {
  return [shelf, whisper];
}

/** @param {{bad?: boolean, hint?: string | null, action?: [string, Function]}} [more] */
export function notice(text, { bad = false, hint = null, action = null } = {}) {
  const close = () => note.remove();
  const note = el("div", { class: bad ? "notice bad" : "notice" },
    el("div", {}, el("p", {}, text), hint && el("p", { class: "quiet" }, hint)),
    action && el("button", { type: "button", onclick: () => {
      close();
      action[1]();
    } }, action[0]),
    el("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: close }, "×"));
  shelf.append(note);
  while (shelf.children.length > 3) shelf.firstChild.remove();
  setTimeout(close, bad ? STAYS * 2 : STAYS);
}

export function failed(error) {
  notice(error.message, { bad: true, hint: error.hint });
}

/** For screen readers alone. */
export function say(text) {
  put(whisper, text);
}
