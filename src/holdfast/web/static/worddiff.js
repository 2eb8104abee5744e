// Which words were taken out of a text and which were put in.

import { el } from "./dom.js";

const MOST_CELLS = 1_500_000;
const SHOWN_AROUND = 160;

/** @returns {Array<["same" | "out" | "in", string]>} pieces in order; one of each where too much differs */
export function wordDiff(before, after) {
  const a = before.match(WORDS) ?? [], b = after.match(WORDS) ?? [];
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const left = a.slice(start, a.length - end), right = b.slice(start, b.length - end);
  const pieces = [["same", a.slice(0, start).join("")]];
  if (left.length * right.length > MOST_CELLS) pieces.push(["out", left.join("")], ["in", right.join("")]);
  else pieces.push(...between(left, right));
  pieces.push(["same", a.slice(a.length - end).join("")]);
  return merged(pieces);
}

/** The pieces as nodes. `side` leaves out the pieces of the other side. */
export function drawWordDiff(before, after, side = null) {
  const skipped = { before: "in", after: "out" }[side];
  const pieces = wordDiff(before, after).filter(([kind]) => kind !== skipped);
  const last = pieces.length - 1;
  return el("div", { class: "words" }, pieces.map(([kind, text], n) => {
    if (kind === "out") return el("del", {}, text);
    if (kind === "in") return el("ins", {}, text);
    return shortened(text, n === 0, n === last);
  }));
}

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** Longest common subsequence. */
function between(a, b) {
  const wide = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const at = i * wide + j;
      longest[at] = a[i] === b[j] ? longest[at + wide + 1] + 1 : Math.max(longest[at + wide], longest[at + 1]);
    }
  }
  const out = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      out.push(["same", a[i++]]);
      j++;
    } else if (i < a.length && (j === b.length || longest[(i + 1) * wide + j] >= longest[i * wide + j + 1])) {
      out.push(["out", a[i++]]);
    } else out.push(["in", b[j++]]);
  }
  return out;
}

/** Neighbours of one kind become one; a space between two changed words belongs to the change. */
function merged(pieces) {
  const out = [];
  let gone = "", put = "";
  const flush = () => {
    if (gone) out.push(["out", gone]);
    if (put) out.push(["in", put]);
    gone = put = "";
  };
  pieces.forEach(([kind, text], n) => {
    if (!text) return;
    const next = pieces[n + 1]?.[0];
    if (kind === "out") gone += text;
    else if (kind === "in") put += text;
    else if (gone && put && !text.trim() && next && next !== "same") {
      gone += text;
      put += text;
    } else {
      flush();
      if (out.at(-1)?.[0] === "same") out.at(-1)[1] += text;
      else out.push(["same", text]);
    }
  });
  flush();
  return out;
}

/** Show unchanged text only near changes. */
function shortened(text, first, last) {
  if (text.length <= SHOWN_AROUND * 2.5) return text;
  const head = first ? "" : text.slice(0, SHOWN_AROUND), tail = last ? "" : text.slice(-SHOWN_AROUND);
  const gap = el("span", { class: "gap", title: `${text.length - head.length - tail.length} characters that did not change` }, " … ");
  return [head, gap, tail];
}
