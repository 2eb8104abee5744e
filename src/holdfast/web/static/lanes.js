// The lanes of a tree, the newest row first: one column per branch, with lines from child to parent.

import { svg } from "./dom.js";

export const LANE = 14;
const MOST_LANES = 12;
const EDGE = 10;

/** Hands out lanes from the tips of the branches down to their roots. */
export class Lanes {
  constructor() {
    this.lanes = [];
    this.branches = 0;
  }

  /**
   * The next row. `hot` is whether it lies on the way to the head.
   * @returns {{lane: number, branch: number, tip: boolean, joins: Array, through: Array, down: boolean,
   *   hot: boolean, width: number}} `joins` end in the row, `through` pass it by: [lane, hot] each
   */
  row(id, parent, hot) {
    const joins = [], through = [];
    for (const [n, lane] of this.lanes.entries()) if (lane) (lane.wants === id ? joins : through).push([n, lane.hot]);
    const tip = joins.length === 0;
    let at = tip ? this.lanes.indexOf(null) : joins[0][0];
    if (at < 0) at = this.lanes.length;
    const branch = tip ? this.branches++ : this.lanes[at].branch;
    for (const [n] of joins) this.lanes[n] = null;
    this.lanes[at] = parent ? { wants: parent, branch, hot } : null;
    const width = Math.max(this.lanes.length, at + 1);
    while (this.lanes.length && this.lanes.at(-1) === null) this.lanes.pop();
    return { lane: at, branch, tip, joins, through, down: Boolean(parent), hot, width };
  }

  /** Rows are left out, down to this one. */
  skipTo(id) {
    for (const lane of this.lanes) if (lane) lane.wants = id;
  }

  /** How many branches go on below the last row. */
  get open() {
    return this.lanes.filter(Boolean).length;
  }

  /** A row below the last one that has no checkpoint: everything passes it by. */
  below(of) {
    const through = this.lanes.flatMap((lane, n) => (lane && n !== of.lane ? [[n, lane.hot]] : []));
    return { ...of, joins: [], through, width: Math.max(this.lanes.length, of.lane + 1) };
  }
}

export function lanesWidth(lanes) {
  return EDGE * 2 + (Math.min(lanes, MOST_LANES) - 1) * LANE;
}

/** The drawing at the left of a row. `kind` is checkpoint, pruned or origin. */
export function drawLanes(place, { height, width, kind, isHead, damaged }) {
  const middle = height / 2, own = laneX(place.lane);
  const cold = [], hot = [];
  const line = (isHot, d) => (isHot ? hot : cold).push(d);
  for (const [n, isHot] of place.through) line(isHot, `M${laneX(n)} 0V${height}`);
  for (const [n, isHot] of place.joins) {
    const x = laneX(n);
    line(isHot, x === own ? `M${x} 0V${middle}` : `M${x} 0C${x} ${middle * 0.9} ${own} ${middle * 0.3} ${own} ${middle}`);
  }
  const parts = [];
  if (kind === "checkpoint") {
    if (place.down) line(place.hot, `M${own} ${middle}V${height}`);
  } else {
    const end = kind === "origin" ? middle : height;
    parts.push(svg("path", { d: `M${own} 0V${end}`, class: place.hot ? "lane hot gone" : "lane gone" }));
    if (kind === "origin") parts.push(svg("path", { d: `M${own} ${middle}H${width}`, class: "lane gone" }));
  }
  if (cold.length) parts.unshift(svg("path", { d: cold.join(""), class: "lane" }));
  if (hot.length) parts.push(svg("path", { d: hot.join(""), class: "lane hot" }));
  if (kind === "checkpoint") parts.push(laneNode(own, middle, place.hot, isHead, damaged));
  return svg("svg", { class: "lanes", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, parts);
}

function laneNode(x, y, hot, isHead, damaged) {
  if (damaged) {
    return svg("path", { d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8`, class: "node broken" });
  }
  if (!isHead) return svg("circle", { cx: x, cy: y, r: 4, class: hot ? "node hot" : "node" });
  return svg("g", { class: "node head" }, svg("circle", { cx: x, cy: y, r: 6.5 }), svg("circle", { cx: x, cy: y, r: 3, class: "dot" }));
}

function laneX(lane) {
  return EDGE + Math.min(lane, MOST_LANES - 1) * LANE;
}
