// Two checkpoints side by side: their common ancestor, the cost of each since then, and the differences.

import { api } from "./api.js";
import { changeList } from "./changes.js";
import { el, put, svg } from "./dom.js";
import { icon } from "./icons.js";
import { errorNode } from "./shown.js";
import { addressOf, go } from "./view.js";
import { compact, grouped, money, moment, plural, shortId, spent, statusWord, titleOf } from "./words.js";

const SHORT_WAY = 8;

export class Compare {
  constructor() {
    this.body = el("div", { class: "scroll", tabindex: "0" });
    this.node = el("section", { class: "pane compare", "aria-label": "Comparison", hidden: true },
      el("header", { class: "bar-head" }, el("h2", {}, "Compare"),
        el("button", { type: "button", class: "plain", onclick: () => this.swap() }, "Swap"),
        el("button", { type: "button", class: "plain", "aria-label": "Close the comparison", title: "Close (Esc)", onclick: () => go({ other: null }) }, icon("close"))),
      this.body);
  }

  swap() {
    if (this.shown) go({ session: this.shown.a.session, id: this.shown.a.id, other: this.shown.b.id });
  }

  /** `a` is the marked checkpoint, `b` the selected one. */
  async show(a, b) {
    const asked = `${a} ${b}`;
    this.node.hidden = false;
    if (this.asked === asked) return;
    this.asked = asked;
    put(this.body, el("p", { class: "quiet", role: "status" }, "Comparing…"));
    try {
      const told = await api.get("diff", { a, b });
      const [ofA, ofB] = await Promise.all([a, b].map((id) => api.get("way", { id, until: told.ancestor })));
      told.ways = { a: ofA.items, b: ofB.items };
      if (this.asked !== asked) return;
      this.shown = told;
      put(this.body, drawComparison(told));
    } catch (error) {
      if (this.asked === asked) put(this.body, errorNode(error));
    }
  }

  hide() {
    this.node.hidden = true;
    this.asked = null;
  }
}

function drawComparison(told) {
  const side = (name) => compareSide(name, told[name], told.steps[name], told.usage[name], told.ways[name]);
  return [
    el("div", { class: "sides heads" }, side("a"), side("b")),
    parting(told),
    told.changes.length ? changeList(told.changes, { before: told.a.id, after: told.b.id, sides: true }) : el("div", { class: "empty" }, el("p", {}, "Their states are equal.")),
  ];
}

function compareSide(name, of, steps, usage, way) {
  const where = addressOf({ session: of.session, id: of.id, other: null, pane: "detail" });
  const title = el("h3", {}, el("span", { class: "mark" }, name.toUpperCase()), el("a", { href: where }, of.damaged ? shortId(of.id) : `Step ${grouped(of.step)}, ${titleOf(of)}`));
  if (of.damaged) return el("div", { class: "side" }, title, el("p", { class: "bad" }, of.damaged));
  return el("div", { class: "side" }, title,
    el("p", { class: "quiet" }, `${of.session} · ${statusWord(of.status)} · ${moment(of.created_at)}`),
    el("p", {}, `${plural(steps, "step")} since they parted: ${spent(usage)}`), wayNode(way, steps));
}

/** The checkpoints of one way, the newest first; a long one is folded. */
function wayNode(way, steps) {
  if (!way.length) return null;
  const left = steps - way.length;
  return el("details", { class: "way", open: way.length <= SHORT_WAY },
    el("summary", {}, way.length > SHORT_WAY ? `The ${plural(steps, "checkpoint")} of this way` : "Its way"),
    el("ol", {}, way.map(wayStop), left > 0 && el("li", { class: "quiet" }, `${plural(left, "checkpoint")} before these`)));
}

function wayStop(row) {
  const where = addressOf({ session: row.session, id: row.id, other: null, pane: "detail" });
  if (row.damaged) return el("li", {}, el("a", { href: where }, shortId(row.id)), el("span", { class: "bad" }, "damaged"));
  return el("li", {}, el("span", { class: "step" }, grouped(row.step)), el("a", { href: where }, titleOf(row)), el("span", { class: "quiet" }, spent(row.usage)));
}

/** "12k tokens more", "$0.60 less" */
function apart(difference, shown) {
  return `${shown(Math.abs(difference))} ${difference < 0 ? "less" : "more"}`;
}

/** Where the two ways part, drawn with their lengths. */
function parting({ ancestor, steps, usage }) {
  if (ancestor === null) return el("p", { class: "quiet" }, "They have no ancestor in common.");
  const longest = Math.max(steps.a, steps.b, 1);
  const end = (count) => 70 + (count / longest) * 300;
  const way = (name, y) => {
    const x = end(steps[name]);
    const path = steps[name] ? `M30 32C50 32 44 ${y} 70 ${y}H${x}` : `M30 32C40 32 46 ${y} ${x} ${y}`;
    return [svg("path", { d: path, class: name === "b" ? "lane hot" : "lane" }), svg("circle", { cx: x, cy: y, r: 5, class: name === "b" ? "node hot" : "node" }), svg("text", { x: x + 12, y: y + 4 }, `${name.toUpperCase()}  ${plural(steps[name], "step")}`)];
  };
  const tokens = usage.b.tokens - usage.a.tokens, cost = usage.b.cost - usage.a.cost;
  return el("div", { class: "parting" },
    svg("svg", { viewBox: "0 0 520 64", role: "img", "aria-label": `They part at ${shortId(ancestor)}` }, way("a", 14), way("b", 50), svg("circle", { cx: 30, cy: 32, r: 5, class: "node" })),
    el("p", {}, "Common ancestor ", el("a", { href: addressOf({ id: ancestor, session: null, other: null, pane: "detail" }) }, shortId(ancestor)), `. Since then B used ${tokens ? `${apart(tokens, (count) => `${compact(count)} tokens`)} than` : "as many tokens as"} A, and cost ${cost ? apart(cost, money) : "the same"}.`));
}
