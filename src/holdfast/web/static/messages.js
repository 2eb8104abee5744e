// A readable conversation: roles and texts, and each tool call with its result.

import { api } from "./api.js";
import { readMessage } from "./conversation.js";
import { dataImage, el, put } from "./dom.js";
import { icon } from "./icons.js";
import { markdown } from "./markdown.js";
import { awaited, textNode, valueNode } from "./shown.js";
import { brief, folded, isObject, pathText } from "./values.js";
import { bytes, grouped, plural } from "./words.js";

const MESSAGE_PAGE = 50;
const STYLED = new Set(["user", "system"]);
const SMALL_IMAGE = 500_000;

/** The tab: the last messages, and earlier ones on demand. */
export async function showMessages(checkpoint, signal) {
  const page = await api.get("messages", { id: checkpoint.id, limit: MESSAGE_PAGE }, signal);
  const node = el("div", { class: "conversation" });
  const draw = (items, start) => {
    put(node, el("p", { class: "quiet" }, `${plural(page.length, "message")} in `, el("code", {}, pathText(page.path))),
      start > 0 && el("button", { type: "button", class: "more", onclick: (event) => earlier(event.target, items, start) }, `Show earlier ones: ${grouped(start)} are above`),
      conversationNodes(items.map((value, n) => ({ value, at: { id: checkpoint.id, path: [...page.path, start + n] }, index: start + n }))));
    if (!page.length) node.append(el("div", { class: "empty" }, el("p", {}, "Nothing was said yet.")));
  };
  const earlier = async (button, items, start) => {
    button.disabled = true;
    const from = Math.max(start - MESSAGE_PAGE * 2, 0);
    try {
      const more = await api.get("messages", { id: checkpoint.id, path: page.path, start: from, limit: start - from });
      draw(more.items.concat(items), from);
    } catch (error) {
      button.replaceWith(el("p", { class: "bad" }, error.message));
    }
  };
  draw(page.items, page.start);
  return node;
}

/** Messages as cards. Results of calls that are here are shown with their calls. */
export function conversationNodes(entries) {
  const read = entries.map((entry) => ({ ...entry, message: readMessage(entry.value) }));
  const results = new Map(), called = new Set();
  for (const { message, at } of read) {
    for (const block of message?.blocks ?? []) {
      if (block.kind === "result" && block.id !== null) results.set(block.id, { block, at });
      if (block.kind === "call" && block.id !== null) called.add(block.id);
    }
  }
  return read.map((entry) => {
    const blocks = entry.message?.blocks ?? [];
    if (blocks.length && blocks.every((block) => block.kind === "result" && called.has(block.id))) return null;
    return messageCard(entry, results, called);
  });
}

/** One message. `results` is a map of results by the id of their call; null where nothing is known of them. */
export function messageCard({ value, at, index, message = readMessage(value) }, results = null, called = new Set()) {
  const role = message?.role ?? "value";
  const blocks = message ? message.blocks.filter((block) => !(block.kind === "result" && called.has(block.id))) : [];
  return el("article", { class: STYLED.has(role) ? `message ${role}` : "message" },
    el("header", {}, el("span", { class: "role" }, role), index !== undefined && el("span", { class: "index" }, index), message?.name && el("span", { class: "quiet" }, message.name)),
    message ? blocks.map((block) => blockNode(block, at, results)) : valueNode(value, at),
    message && !blocks.length && (others(value).length ? valueNode(Object.fromEntries(others(value)), at) : el("p", { class: "quiet" }, "empty")));
}

/** The content of a message whose format is unknown. */
function others(value) {
  return Object.entries(value).filter(([key, each]) => !["role", "type", "content", "id"].includes(key) && each !== null);
}

function blockNode(block, at, results) {
  const where = at && { id: at.id, path: [...at.path, ...block.path] };
  switch (block.kind) {
    case "text":
      return typeof block.text === "string" ? textNode(block.text, markdown) : unfolding(block.text, where);
    case "thinking":
      return el("details", { class: "thinking" }, el("summary", {}, block.title ?? "Thinking"), typeof block.text === "string" ? textNode(block.text) : valueNode(block.text, where));
    case "call":
      return callNode(block, where, results);
    case "result":
      return el("div", { class: block.error ? "result failed" : "result" }, el("span", { class: "quiet" }, block.error ? "failed" : "result", block.id && ` of ${block.id}`), resultNode(block, where));
    case "image":
      return imageNode(block, where);
    default:
      return valueNode(block.value, where);
  }
}

/** Prose that the server has cut. */
function unfolding(text, where) {
  const cut = folded(text);
  if (!cut || cut.kind !== "str") return valueNode(text, where);
  const node = el("div", { class: "folded" }, el("div", { class: "prose" }, markdown(`${cut.start}…`)));
  if (where) node.append(el("button", { type: "button", class: "unfold", onclick: () => awaited(node, api.get("value", where), (all) => el("div", { class: "prose" }, markdown(all))) }, `Show all: ${grouped(cut.length)} characters`));
  return node;
}

function callNode(block, where, results) {
  const answer = block.id === null ? undefined : results?.get(block.id);
  const open = results !== null && !answer;
  return el("div", { class: open ? "call open" : "call" },
    el("div", { class: "callhead" }, icon("tool"), el("code", { class: "tool" }, block.name),
      open && el("span", { class: "waiting" }, "no result yet"),
      answer?.block.error && el("span", { class: "bad" }, "failed"),
      block.id && el("span", { class: "quiet id" }, block.id)),
    argumentsNode(block.arguments, where),
    answer && el("div", { class: answer.block.error ? "result failed" : "result" }, resultNode(answer.block, answer.at && { id: answer.at.id, path: [...answer.at.path, ...answer.block.path] })));
}

function argumentsNode(given, where) {
  if (!isObject(given) || folded(given)) return given === undefined ? null : valueNode(given, where);
  const entries = Object.entries(given);
  if (!entries.length) return null;
  return el("dl", { class: "arguments" }, entries.map(([name, value]) => [
    el("dt", {}, name),
    el("dd", {}, typeof value === "string" ? textNode(value) : folded(value) ? valueNode(value) : el("code", {}, brief(value, 300))),
  ]));
}

function resultNode(block, where) {
  if (!Array.isArray(block.value)) return valueNode(block.value, where);
  const inner = readMessage({ role: "result", content: block.value });
  return inner.blocks.map((part) => (part.kind === "text" && typeof part.text === "string" ? textNode(part.text) : blockNode({ ...part, path: part.path.slice(1) }, where, null)));
}

function imageNode(block, where) {
  if (block.src !== undefined) {
    return dataImage(block.src, "an image of the conversation") ?? el("p", { class: "quiet" }, "An image elsewhere, not fetched: ", el("code", {}, brief(block.src, 200)));
  }
  const node = el("div", {});
  if (!where) return put(node, el("p", { class: "quiet" }, "An image; Messages shows it."));
  const fetched = () => awaited(node, api.get("value", where), (data) => dataImage(block.lead + data, "an image of the conversation") ?? el("p", { class: "quiet" }, "This is no image that can be shown."));
  if (block.length <= SMALL_IMAGE) fetched();
  else put(node, el("button", { type: "button", class: "unfold", onclick: fetched }, `Show the image: ${bytes(block.length)}`));
  return node;
}
