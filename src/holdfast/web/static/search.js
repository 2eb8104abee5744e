// The search: checkpoints by label, tags, metadata and text in their states.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { addressOf } from "./view.js";
import { grouped, shortId, titleOf } from "./words.js";

const MOST_FOUND = 12;

/**
 * Checkpoints whose label, tags, metadata or state have the text, or whose metadata has key=value. Of those
 * that have a text in their states, the ones that brought it.
 * @param {Element} node where they are shown @param {Object} view what is looked for
 */
export async function searchCheckpoints(node, { text: typed, status, agent, tag }, signal) {
  const text = typed.trim();
  const ask = (query) => api.get("search", { ...query, status, agent, tag, limit: MOST_FOUND }, signal);
  drawHits(node, text, [], "Searching…");
  try {
    const said = ask({ text, fold: 1 });
    said.catch(() => {}); // whoever waits for it below is told
    const marked = [{ mark: text }, ...(/^[^=]+=/.test(text) ? [{ meta: text }] : [])];
    const marks = await Promise.all(marked.map(ask));
    drawHits(node, text, marks, "Searching the messages…");
    drawHits(node, text, [...marks, await said]);
  } catch (error) {
    if (error.name !== "AbortError") put(node, el("p", { class: "bad", role: "status" }, error.message));
  }
}

/** Marks are found at once; messages take as long as there are some to look through. */
function drawHits(node, text, pages, searching = null) {
  const hits = new Map();
  for (const { items, found } of pages) for (const row of items) if (!hits.has(row.id)) hits.set(row.id, [row, found[row.id]]);
  const more = pages.some((page) => page.next !== null) || hits.size > MOST_FOUND;
  const word = searching ?? (hits.size === 0 ? "No label, tag, metadata or message has this text." : more ? "The newest of more." : null);
  put(node, el("h2", {}, "Checkpoints"),
    el("ul", {}, [...hits.values()].slice(0, MOST_FOUND).map(([row, found]) => hitRow(row, found, text))),
    word && el("p", { class: "quiet", role: "status" }, word));
}

function hitRow(row, { excerpt, count }, text) {
  const where = addressOf({ session: row.session, id: row.id, other: null, pane: "detail" });
  const since = count > 1 && el("span", { class: "quiet" }, `and in ${grouped(count - 1)} after it`);
  return el("li", {}, el("a", { href: where, class: "hit" },
    el("span", { class: "name" }, titleOf(row)),
    excerpt && excerpt !== row.label && el("span", { class: "excerpt" }, highlighted(excerpt, text)),
    el("span", { class: "quiet" }, row.damaged ? row.damaged : `${row.session} · step ${row.step} · ${shortId(row.id)}`), since));
}

/** The text, with the searched text marked in it. */
function highlighted(excerpt, text) {
  const at = excerpt.toLowerCase().indexOf(text.toLowerCase());
  if (at < 0) return excerpt;
  return [excerpt.slice(0, at), el("mark", {}, excerpt.slice(at, at + text.length)), excerpt.slice(at + text.length)];
}
