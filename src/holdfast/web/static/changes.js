// The changes of a checkpoint: messages as messages, edited text word by word, other values by their path.

import { api } from "./api.js";
import { showBlame } from "./blame.js";
import { isConversation, messagePlace, readMessage } from "./conversation.js";
import { el, put } from "./dom.js";
import { messageCard } from "./messages.js";
import { awaited, copyButton, valueNode } from "./shown.js";
import { folded, isAskable, pathText } from "./values.js";
import { plural, shortId } from "./words.js";
import { drawWordDiff } from "./worddiff.js";

const MOST_CHANGES = 2000;
const SIGNS = { added: "+", removed: "−", changed: "~" };

/** The tab: from the nearest ancestor to a checkpoint. */
export async function showChanges(checkpoint, signal) {
  const told = await api.get("changes", { id: checkpoint.id }, signal);
  const pruned = checkpoint.pruned ? `, ${plural(checkpoint.pruned, "checkpoint")} before (the ones between were pruned)` : "";
  const since = told.from === null ? "The first checkpoint: all that it has." : `Since ${shortId(told.from)}${pruned}.`;
  return el("div", { class: "changes" },
    el("p", { class: "quiet" }, since),
    told.changes.length ? changeList(told.changes, { before: told.from, after: checkpoint.id }) : el("div", { class: "empty" }, el("p", {}, "Nothing changed in the state."), el("p", { class: "quiet" }, "Such a checkpoint marks a moment: a status, a label, a turn.")));
}

/**
 * @param {Array} changes
 * @param {{before: string | null, after: string, sides?: boolean}} of the ids, and whether they stand side by side
 */
export function changeList(changes, of) {
  const all = changes.flatMap(spread);
  const spoken = all.filter(({ place, change }) => place && (place.rest.length || readMessage(change.after ?? change.before)));
  const others = all.filter((entry) => !spoken.includes(entry));
  return [
    spoken.length > 0 && el("section", { class: "group" }, el("h3", {}, "Messages ", tally(spoken)), byMessage(spoken).map((entries) => messageChange(entries, of))),
    others.length > 0 && el("section", { class: "group" }, el("h3", {}, "State ", tally(others)), others.map((entry) => stateChange(entry.change, of))),
    changes.length >= MOST_CHANGES && el("p", { class: "quiet" }, `Only the first ${MOST_CHANGES} changes are shown.`),
  ];
}

/** A list of messages that came or went as a whole is shown message by message. */
function spread(change) {
  const value = change.after ?? change.before;
  const items = change.kind === "changed" ? null : folded(value)?.kind === "list" ? folded(value).start : value;
  if (!isConversation(items)) return [{ change, place: messagePlace(change.path) }];
  const key = change.kind === "added" ? "after" : "before";
  const found = items.map((item, n) => ({
    change: { kind: change.kind, path: [...change.path, n], [key]: item },
    place: { list: change.path, index: n, rest: [] },
  }));
  const left = folded(value) ? folded(value).length - items.length : 0;
  return left ? [...found, { change: { kind: change.kind, path: [...change.path, "…"], note: `${plural(left, "more message")}: see Messages` }, place: null }] : found;
}

function tally(entries) {
  const counts = Object.keys(SIGNS).map((kind) => [kind, entries.filter(({ change }) => change.kind === kind).length]);
  return counts.filter(([, count]) => count).map(([kind, count]) => el("span", { class: `count ${kind}` }, `${SIGNS[kind]}${count}`));
}

/** Group the edits of one message. */
function byMessage(entries) {
  const groups = [];
  for (const entry of entries) {
    const last = groups.at(-1)?.[0];
    const same = last?.place.rest.length && entry.place.rest.length && pathText(last.change.path.slice(0, -last.place.rest.length)) === pathText(entry.change.path.slice(0, -entry.place.rest.length));
    if (same) groups.at(-1).push(entry);
    else groups.push([entry]);
  }
  return groups;
}

function messageChange(entries, of) {
  const [{ change, place }] = entries;
  if (place.rest.length && entries.length === 1) return stateChange(change, of, "edited");
  if (place.rest.length) {
    return el("div", { class: "edited" }, el("p", { class: "quiet" }, `Message ${place.index} edited`), entries.map((entry) => stateChange(entry.change, of)));
  }
  const card = (key) => key in change && messageCard({ value: change[key], at: atSide(change, key, of), index: place.index });
  if (change.kind === "changed" || of.sides) return changeBox(change, of, null, card("before"), card("after"));
  return el("div", { class: `change ${change.kind}` }, el("span", { class: "sign", title: change.kind }, SIGNS[change.kind]), card(change.kind === "added" ? "after" : "before"));
}

function stateChange(change, of, title = null) {
  if (change.note) return el("p", { class: "quiet" }, change.note);
  const { before, after } = change;
  if (change.kind === "changed" && typeof before === "string" && typeof after === "string") {
    if (of.sides) return changeBox(change, of, title, drawWordDiff(before, after, "before"), drawWordDiff(before, after, "after"));
    return changeBox(change, of, title, null, drawWordDiff(before, after));
  }
  if (change.kind === "changed" && (folded(before)?.kind === "str" || folded(after)?.kind === "str") && !of.sides) {
    return changeBox(change, of, title, null, longEdit(change, of));
  }
  const side = (key) => key in change && valueNode(change[key], atSide(change, key, of));
  return changeBox(change, of, title, side("before"), side("after"));
}

function changeBox(change, of, title, before, after) {
  const blamed = el("div", { class: "blame" });
  const path = pathText(change.path);
  const asked = isAskable(change.path) ? blameOf(change, of) : null;
  const name = asked
    ? el("button", { type: "button", class: "path", title: asked.title, onclick: () => showBlame(blamed, asked.id, change.path, asked.lead) }, path)
    : el("span", { class: "path" }, path);
  return el("div", { class: `change ${change.kind} boxed` },
    el("div", { class: "changehead" }, el("span", { class: "sign", title: change.kind }, SIGNS[change.kind]), title && el("span", { class: "quiet" }, title), name, copyButton(path, "Copy the path")),
    of.sides
      ? el("div", { class: "sides" }, el("div", { class: "side before" }, before || el("span", { class: "quiet" }, "not there")), el("div", { class: "side after" }, after || el("span", { class: "quiet" }, "not there")))
      : el("div", { class: "body" }, before && el("div", { class: "was" }, before), after && el("div", { class: "is" }, after)),
    blamed);
}

/** Side by side: who made it what it is. Otherwise that is known, and the one before is asked for. */
function blameOf(change, of) {
  if (of.sides) return change.kind === "removed" ? null : { id: of.after, title: "When did this change?", lead: "Changed in " };
  const at = change.kind === "added" ? null : atSide(change, "before", of);
  return at && { id: at.id, title: "When did this change before?", lead: "Before this, it changed in " };
}

/** Where the whole of one side of a change can be asked for. */
function atSide(change, key, of) {
  const id = key === "after" ? of.after : of.before;
  // Positions in a list are those of the newer state, unless something was removed.
  const moved = key === "before" && change.kind === "changed" && change.path.some(Number.isInteger);
  return id === null || moved ? null : { id, path: change.path };
}

/** A long text that was edited: both are asked for, and compared here. */
function longEdit(change, of) {
  const node = el("div", {}, valueNode(change.after));
  if (!isAskable(change.path) || of.before === null || change.path.some(Number.isInteger)) return node;
  const both = () => Promise.all([api.get("value", { id: of.before, path: change.path }), api.get("value", { id: of.after, path: change.path })]);
  put(node, el("button", { type: "button", class: "unfold", onclick: () => awaited(node, both(), ([was, is]) => drawWordDiff(String(was), String(is))) }, "Compare these long texts word by word"));
  return node;
}
