// Small drawings that say why a checkpoint was taken, and how it stands.

import { svg } from "./dom.js";

const DRAWN = {
  user: "M8 8.2a2.7 2.7 0 1 0 0-5.4 2.7 2.7 0 0 0 0 5.4M3 13.5c.4-2.7 2.4-3.9 5-3.9s4.6 1.2 5 3.9",
  model: "M8 2.2l1.5 4.3L13.8 8l-4.3 1.5L8 13.8l-1.5-4.3L2.2 8l4.3-1.5z",
  tool: "M13 4.6a3.4 3.4 0 0 1-4.6 4.1L4.6 12.6a1.3 1.3 0 0 1-1.9-1.9l3.9-3.9A3.4 3.4 0 0 1 10.9 2.3L8.9 4.4l1.9 1.9z",
  turn: "M13 8a5 5 0 1 1-1.6-3.7M13.2 2.4v2.8h-2.8",
  manual: "M3 13l.7-3L10.6 3a1.6 1.6 0 0 1 2.3 2.3L6 12.3z",
  clock: "M8 2.6a5.4 5.4 0 1 0 0 10.8 5.4 5.4 0 0 0 0-10.8M8 5v3.2l2.1 1.3",
  run: "M5 3.2v9.6L12.6 8z",
  save: "M3.4 3.4h9.2v9.2H3.4zM6 8l1.6 1.7L10.4 6.4",
  append: "M8 3.4v9.2M3.4 8h9.2",
  patch: "M2.8 9.4c1.6-3.6 3.4-3.6 5.2-1.4s3.6 2.2 5.2-1.4",
  fork: "M5 13V3M5 9.5c0-3.4 6-2 6-5.6",
  completed: "M3.2 8.4l3.2 3.2 6.4-7",
  failed: "M4 4l8 8M12 4l-8 8",
  halted: "M5.6 3.6v8.8M10.4 3.6v8.8",
  in_progress: "M4 8h.01M8 8h.01M12 8h.01",
  pending: "M8 2.4a5.6 5.6 0 1 0 0 11.2A5.6 5.6 0 0 0 8 2.4M6.5 6v4M9.5 6v4",
  back: "M10 3L5 8l5 5",
  close: "M4 4l8 8M12 4l-8 8",
  undo: "M3 6.4h6.6a3.2 3.2 0 0 1 0 6.4H6M5.8 3.4L2.8 6.4l3 3",
  redo: "M13 6.4H6.4a3.2 3.2 0 0 0 0 6.4H10M10.2 3.4l3 3-3 3",
  theme: "M13 9.6A5.4 5.4 0 0 1 6.4 3a5.4 5.4 0 1 0 6.6 6.6",
  copy: "M5.6 5.6h7v7h-7zM10.4 5.6v-2.2h-7v7h2.2",
  child: "M4 3v5.5a2 2 0 0 0 2 2h6",
};
const TRIGGERS = [
  [/user|human|input|ask/i, "user"],
  [/tool/i, "tool"],
  [/model|llm|assistant|response/i, "model"],
  [/manual|hand/i, "manual"],
  [/second|minute|time|interval/i, "clock"],
  [/turn|step|every|loop/i, "turn"],
  [/run/i, "run"],
];

export function icon(name, title) {
  return svg(
    "svg",
    { class: `icon i-${name}`, viewBox: "0 0 16 16", width: 16, height: 16, role: title ? "img" : null, "aria-hidden": title ? null : "true" },
    title && svg("title", {}, title),
    svg("path", { d: DRAWN[name] }),
  );
}

/** Why a checkpoint was taken. */
export function triggerIcon(row) {
  const found = row.trigger && TRIGGERS.find(([words]) => words.test(row.trigger));
  return icon(found ? found[1] : Object.hasOwn(DRAWN, row.operation) ? row.operation : "save");
}
