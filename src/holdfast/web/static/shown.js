// Values and errors as every part of the page shows them.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { brief, byteCount, folded, isAskable, plain } from "./values.js";
import { bytes, grouped } from "./words.js";

const FOLD_FROM = 1_200;
const LEFT_OF_IT = 700;
const SHORT = 90;

/** An error, and its hint. */
export function errorNode(error) {
  return el("div", { class: "problem", role: "alert" }, el("p", { class: "bad" }, error.message), error.hint && el("p", { class: "quiet" }, error.hint));
}

/** A value to read. `at` ({id, path}) is where all of it can be asked for. */
export function valueNode(value, at = null) {
  const cut = folded(value);
  if (cut) return foldedNode(cut, at);
  if (typeof value === "string") return textNode(value);
  const line = brief(value, SHORT);
  if (line.length < SHORT && !line.includes("…")) return el("code", { class: "value" }, line);
  return foldable(plain(value), "pre", "value");
}

/** Text as it is; long text and base64 folded. */
export function textNode(text, draw = null) {
  if (isBase64(text)) {
    const button = el("button", { type: "button", class: "unfold", onclick: () => button.replaceWith(el("pre", { class: "value" }, text)) }, `base64, ${bytes(byteCount(text))}: show it`);
    return button;
  }
  if (draw && text.length <= FOLD_FROM * 4) return el("div", { class: "prose" }, draw(text));
  return foldable(text, "pre", "text");
}

export function copyButton(text, title, words = null) {
  const button = el("button", { type: "button", class: "copy", title, "aria-label": title, onclick: async (event) => {
    event.preventDefault(); // within a summary, it must not open it
    try {
      await navigator.clipboard.writeText(text);
      button.classList.add("done");
      setTimeout(() => button.classList.remove("done"), 1200);
    } catch {
      getSelection().selectAllChildren(button);
    }
  } }, words, icon("copy"));
  return button;
}

/** Show a placeholder while a value is loading, and then the value or the error. */
export async function awaited(node, promise, draw) {
  put(node, el("p", { class: "quiet", role: "status" }, "Loading…"));
  try {
    put(node, draw(await promise));
  } catch (error) {
    put(node, errorNode(error));
  }
}

function foldedNode(cut, at) {
  const what = cut.kind === "str" ? `${grouped(cut.length)} characters` : `${cut.kind} of ${grouped(cut.length)}`;
  const start = cut.kind === "str" ? (isBase64(cut.start) ? "base64" : `${cut.start}…`) : brief(cut.start, 400);
  const node = el("div", { class: "folded" }, el("pre", { class: "value" }, start));
  if (!at || !isAskable(at.path)) {
    node.append(el("span", { class: "quiet" }, what));
    return node;
  }
  const button = el("button", { type: "button", class: "unfold", onclick: () => awaited(node, api.get("value", at), (value) => el("pre", { class: "value" }, plain(value))) }, `Show all: ${what}`);
  node.append(button);
  return node;
}

function foldable(text, tag, kind) {
  if (text.length <= FOLD_FROM) return el(tag, { class: kind }, text);
  const node = el("div", { class: "folded" }, el(tag, { class: kind }, `${text.slice(0, LEFT_OF_IT)}…`));
  node.append(el("button", { type: "button", class: "unfold", onclick: () => put(node, el(tag, { class: kind }, text)) }, `Show all: ${grouped(text.length)} characters`));
  return node;
}

function isBase64(text) {
  return text.length >= 200 && /^[A-Za-z0-9+/_-]+={0,2}$/.test(text) && /[0-9]/.test(text) && /[A-Z]/.test(text) && /[a-z]/.test(text);
}
