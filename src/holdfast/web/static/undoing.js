// The effect of undo and redo, in words.

import { age, grouped, plural, titleOf } from "./words.js";

const NOTHING_GOES = "Nothing is deleted, and what the agent did to the outside world is not reversed.";

/** @param {Object} step the server's description of it @param {boolean} undo or redo */
export function upcomingWords(session, step, undo) {
  const again = undo ? "is taken back" : "is done again";
  const { head, checkpoint } = step;
  const when = age(step.created_at ?? checkpoint?.created_at ?? new Date().toISOString());
  const moves = head && (head.to ? `The head moves from ${placeWords(head.from)} to ${placeWords(head.to)}.` : `The head was at ${placeWords(head.from)}; then there is none.`);
  if (step.kind === "fork") {
    return [`The fork that made ${session} (${when}) ${again}.`, undo ? "The session is hidden, as if it were deleted, until gc frees it." : "The session is there again."];
  }
  if (step.saved) return [`The ${step.kind} of ${placeWords(checkpoint)} (${when}) ${again}. ${moves}`, NOTHING_GOES];
  switch (step.kind) {
    case "tag":
      return [`${capital(placeWords(checkpoint))} ${undo ? "loses" : "gets"} the ${step.tags.length === 1 ? "tag" : "tags"} ${step.tags.map(quoted).join(", ") || "(none was new)"}${undo ? "" : " again"}. (Tagged ${when}.)`];
    case "label":
      return [labelWords(step, undo, when)];
    case "delete": case "prune":
      return [`The ${step.kind} (${when}) ${again}: ${plural(step.deleted, "checkpoint")} ${step.deleted === 1 ? "is" : "are"} ${undo ? "there" : "hidden"} again.`];
    default:
      return [`The ${step.kind} (${when}) ${again}. ${moves ?? ""}`.trim(), NOTHING_GOES];
  }
}

function labelWords({ checkpoint, label, was }, undo, when) {
  const [now, then] = undo ? [label, was] : [was, label];
  const where = capital(placeWords({ ...checkpoint, label: null }));
  if (then === null) return `${where} loses its label ${quoted(now)}. (Labelled ${when}.)`;
  return `${where} gets the label ${quoted(then)} again${now === null ? "" : `, in place of ${quoted(now)}`}. (Labelled ${when}.)`;
}

function placeWords(row) {
  if (row === null) return "nowhere";
  return row.damaged ? `number ${grouped(row.seq)}, which is damaged` : `step ${grouped(row.step)}, ${row.label ? quoted(row.label) : titleOf(row)}`;
}

function quoted(text) {
  return `“${text}”`;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
