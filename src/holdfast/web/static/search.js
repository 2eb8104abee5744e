// The search: checkpoints by label, tags, metadata and text in their states.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { addressOf } from "./view.js";
import { shortId, titleOf } from "./words.js";

const MOST_FOUND = 12;

/**
 * Sessions whose names have the text. Checkpoints whose label, tags or metadata have it, or whose metadata has
 * key=value, and those in which it came into the state.
 * @param {Element} node where they are shown @param {Object} view what is looked for
 */
export async function searchCheckpoints(node, { text: typed, status, agent, tag }, signal) {
  const text = typed.trim();
  const ask = (query) => api.get("search", { ...query, status, agent, tag, limit: MOST_FOUND }, signal);
  drawHits(node, [], "Searching…");
  try {
    const said = ask({ text });
    said.catch(() => {}); // whoever waits for it below is told
    const marked = [{ mark: text }, ...(/^[^=]+=/.test(text) ? [{ meta: text }] : [])];
    const marks = await Promise.all(marked.map(ask));
    drawHits(node, marks, "Searching the messages…");
    drawHits(node, [...marks, await said]);
  } catch (error) {
    if (error.name !== "AbortError") put(node, el("p", { class: "bad", role: "status" }, error.message));
  }
}

/** Marks are found at once; messages take as long as there are some to look through. */
function drawHits(node, pages, searching = null) {
  const hits = new Map();
  for (const { items } of pages) {
    for (const hit of items) {
      const key = hit.checkpoint?.id ?? `session ${hit.session}`;
      if (!hits.has(key)) hits.set(key, hit);
    }
  }
  const more = pages.some((page) => page.next !== null) || hits.size > MOST_FOUND;
  const word = searching ?? (hits.size === 0 ? "No label, tag, metadata or message has this text." : more ? "The newest of more." : null);
  put(node, el("h2", {}, "Found"),
    el("ul", {}, [...hits.values()].slice(0, MOST_FOUND).map(hitRow)),
    word && el("p", { class: "quiet", role: "status" }, word));
}

function hitRow({ session, checkpoint: row, snippet, start, end }) {
  const shown = [snippet.slice(0, start), el("mark", {}, snippet.slice(start, end)), snippet.slice(end)];
  const where = addressOf({ session, id: row?.id ?? null, other: null, pane: "detail" });
  if (!row) return el("li", {}, el("a", { href: where, class: "hit" }, el("span", { class: "name" }, shown), el("span", { class: "quiet" }, "session")));
  return el("li", {}, el("a", { href: where, class: "hit" },
    el("span", { class: "name" }, titleOf(row)),
    snippet && snippet !== row.label && el("span", { class: "excerpt" }, shown),
    el("span", { class: "quiet" }, row.damaged ? row.damaged : `${row.session} · step ${row.step} · ${shortId(row.id)}`)));
}
