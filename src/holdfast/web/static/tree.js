// The state as a tree. A branch is loaded when it is opened.

import { api } from "./api.js";
import { showBlame } from "./blame.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { copyButton, errorNode, valueNode } from "./shown.js";
import { brief, isAskable, pathText } from "./values.js";
import { bytes, grouped } from "./words.js";

const ENTRIES = 100;
const ONE_LINE = 100;

/** The tab. */
export async function showState(checkpoint, signal) {
  const root = await api.get("state", { id: checkpoint.id, limit: ENTRIES }, signal);
  if (!isContainer(root)) return el("div", { class: "tree" }, valueNode(root.value, { id: checkpoint.id, path: [] }));
  const list = el("ul", { class: "tree", "aria-label": "State" });
  fill(list, checkpoint.id, [], root);
  return el("div", {}, el("p", { class: "quiet" }, `${root.kind} of ${grouped(root.length)}, ${bytes(root.size)} encoded`), list);
}

function fill(list, id, path, part) {
  for (const item of part.items) list.append(branchNode(id, [...path, item.key], item));
  const next = part.start + part.items.length;
  if (next >= part.length || !part.items.length) return;
  const more = el("li", {}, el("button", { type: "button", class: "more", onclick: async (event) => {
    event.target.disabled = true;
    try {
      const page = await api.get("state", { id, path: path.length ? path : null, start: next, limit: ENTRIES });
      more.remove();
      fill(list, id, path, page);
    } catch (error) {
      put(more, errorNode(error));
    }
  } }, `${grouped(part.length - next)} more`));
  list.append(more);
}

function branchNode(id, path, item) {
  const key = el("span", { class: typeof item.key === "number" ? "key index" : "key" }, typeof item.key === "string" ? item.key : brief(item.key));
  const copy = copyButton(pathText(path), "Copy the path");
  const askable = isAskable(path);
  const blamed = el("div", { class: "blame" });
  const blamer = askable && el("button", { type: "button", class: "copy", title: "When did this last change?", "aria-label": `When did ${pathText(path)} last change?`, onclick: (event) => {
    event.preventDefault();
    showBlame(blamed, id, path);
  } }, icon("clock"));
  if (!isContainer(item)) {
    const short = typeof item.value !== "object" && String(item.value).length < ONE_LINE && !String(item.value).includes("\n");
    const shown = short ? el("code", { class: `leaf ${item.kind}` }, brief(item.value)) : valueNode(item.value, askable ? { id, path } : null);
    return el("li", {}, el("div", { class: "leafrow" }, key, el("span", { class: "kind" }, item.kind), blamer, copy, shown), blamed);
  }
  const summary = el("summary", {}, key, el("span", { class: "kind" }, `${item.kind} of ${grouped(item.length)}, ${bytes(item.size)}`), blamer, copy);
  if (!askable || !item.length) return el("li", {}, el("div", { class: "closed" }, ...summary.childNodes), blamed);
  const inner = el("ul");
  const node = el("details", { ontoggle: async () => {
    if (!node.open || inner.firstChild) return;
    put(inner, el("li", { class: "quiet", role: "status" }, "Loading…"));
    try {
      const part = await api.get("state", { id, path, limit: ENTRIES });
      put(inner);
      fill(inner, id, path, part);
    } catch (error) {
      put(inner, el("li", {}, errorNode(error)));
    }
  } }, summary, inner);
  return el("li", {}, blamed, node);
}

function isContainer(part) {
  return part.kind === "list" || part.kind === "dict";
}
