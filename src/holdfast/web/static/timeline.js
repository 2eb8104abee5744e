// The timeline: a row for each checkpoint on the lanes of its branches. Only the rows in sight are in the page.

import { el, put } from "./dom.js";
import { icon, triggerIcon } from "./icons.js";
import { drawLanes, lanesWidth } from "./lanes.js";
import { compact, lasting, money, moment, plural, shortId, statusWord, titleOf } from "./words.js";
import { go, view } from "./view.js";

export const ROW_HEIGHT = 32;
const AROUND = 12;
const MOST_CHIPS = 2;
const SHORT_NAME = 8; // a name of so many characters is not cut

export class Timeline {
  constructor() {
    this.rows = null;
    this.selected = null;
    this.marked = null;
    this.drawn = new Map();
    this.space = el("div", { class: "space", role: "presentation" });
    this.list = el(
      "div",
      { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Checkpoints, the newest first", onscroll: () => this.later() },
      this.space,
    );
    this.columns = el("div", { class: "columns", "aria-hidden": "true" },
      el("span", { class: "what" }, "Step"), el("span", { class: "took" }, "Took"),
      el("span", { class: "bar" }, "Tokens"), el("span", { class: "bar" }, "Cost"));
    this.node = el("div", { class: "timeline" }, this.columns, this.list);
    new ResizeObserver(() => this.later()).observe(this.list);
  }

  /** Draw these rows, and keep the visible ones in place. */
  show(rows, selected, marked) {
    const top = this.topRow();
    const sameSession = this.rows?.session === rows.session;
    [this.rows, this.selected, this.marked] = [rows, selected, marked];
    for (const node of this.drawn.values()) node.remove();
    this.drawn.clear();
    this.space.style.height = `${rows.length * ROW_HEIGHT}px`;
    if (!sameSession) this.list.scrollTop = 0;
    else if (top && this.list.scrollTop > 0) this.list.scrollTop = (rows.lineOf.get(top.id) ?? 0) * ROW_HEIGHT + top.offset;
    this.draw();
  }

  /** Scroll so that a checkpoint is in sight. */
  reveal(id) {
    const line = this.rows?.lineOf.get(id);
    if (line === undefined) return;
    const top = line * ROW_HEIGHT, height = this.list.clientHeight;
    if (top < this.list.scrollTop + ROW_HEIGHT) this.list.scrollTop = top - Math.min(ROW_HEIGHT * 2, height / 3);
    else if (top + ROW_HEIGHT * 2 > this.list.scrollTop + height) this.list.scrollTop = top - height + ROW_HEIGHT * 3;
    this.draw();
  }

  topRow() {
    const first = Math.floor(this.list.scrollTop / ROW_HEIGHT);
    for (let n = first; n < first + 40; n++) {
      const line = this.rows?.lines[n];
      if (line?.kind === "checkpoint") return { id: line.row.id, offset: this.list.scrollTop - n * ROW_HEIGHT };
    }
    return null;
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  draw() {
    if (!this.rows) return;
    const { rows, list } = this;
    const first = Math.max(Math.floor(list.scrollTop / ROW_HEIGHT) - AROUND, 0);
    const last = Math.min(first + Math.ceil(list.clientHeight / ROW_HEIGHT) + AROUND * 2, rows.length);
    for (const [n, node] of this.drawn) {
      if (n >= first && n < last) continue;
      node.remove();
      this.drawn.delete(n);
    }
    for (let n = first; n < last; n++) {
      if (this.drawn.has(n)) continue;
      const node = this.line(rows.lines[n], n);
      node.style.transform = `translateY(${n * ROW_HEIGHT}px)`;
      this.drawn.set(n, node);
      this.space.append(node);
    }
    const chosen = rows.lineOf.get(this.selected);
    if (this.drawn.has(chosen)) list.setAttribute("aria-activedescendant", `row-${this.selected}`);
    else list.removeAttribute("aria-activedescendant");
    if (!rows.list.length) return;
    let gap = first;
    while (gap < last && rows.lines[gap]) gap += 1;
    const end = !rows.complete && last > rows.lines.length - AROUND;
    if (gap < last) this.askMore(rows, Math.min(gap + Math.floor((last - gap) / 2), rows.length - 1));
    else if (end) this.askMore(rows, rows.lines.length);
  }

  async askMore(rows, line) {
    if (rows.loading) return;
    const known = rows.list.length;
    try {
      await rows.fillAt(line);
    } catch (error) {
      this.onError?.(error);
      return;
    }
    // Drawing asks again: without this, for ever, should nothing have come.
    if (this.rows === rows && (rows.complete || rows.list.length > known)) this.show(rows, this.selected, this.marked);
  }

  line(line, n) {
    if (!line) return el("div", { class: "row awaited", role: "presentation" }, el("span", { class: "ghost" }));
    const width = lanesWidth(this.rows.width);
    const { row, kind, place } = line;
    const graph = (more) => drawLanes(place, { height: ROW_HEIGHT, width, kind, ...more });
    if (kind === "pruned") {
      return el("div", { class: "row aside", role: "presentation" }, graph(), el("span", { class: "quiet" }, `${plural(row.pruned, "checkpoint")} pruned`));
    }
    if (kind === "origin") {
      const from = row.pruned ? row.ancestor : row.parent;
      return el("div", { class: "row aside", role: "presentation" }, graph(), el("span", { class: "quiet" }, "from "), sessionChip(row.parent_session, from, "Back to where it was forked"));
    }
    const isHead = row.id === this.rows.head;
    const parts = row.damaged ? this.brokenParts(row) : this.parts(row, isHead);
    const chosen = row.id === this.selected;
    return el(
      "div",
      {
        class: ["row", chosen && "chosen", !place.hot && "beside", row.damaged && "broken", row.id === this.marked && "marked"].filter(Boolean).join(" "),
        role: "option", id: `row-${row.id}`, "data-id": row.id, "aria-selected": chosen ? "true" : "false",
        "aria-posinset": n + 1, "aria-setsize": this.rows.length,
        onclick: () => go({ id: row.id, pane: "detail" }),
      },
      graph({ isHead, damaged: row.damaged }),
      parts,
    );
  }

  brokenParts(row) {
    return [el("span", { class: "step" }, `#${row.seq}`), el("span", { class: "name" }, "Damaged"), el("span", { class: "quiet grow" }, row.damaged)];
  }

  parts(row, isHead) {
    const took = this.rows.took(row), { most } = this.rows;
    const chips = [...row.forks.map((name) => sessionChip(name, null, "Open the fork")), ...row.tags.map((tag) => el("span", { class: "tag" }, tag))];
    const left = chips.length - MOST_CHIPS;
    return [
      el("span", { class: "step", title: `step ${row.step}, ${moment(row.created_at)}` }, row.step),
      el("span", { class: "why", title: row.trigger ? `${row.operation}, trigger ${row.trigger}` : row.operation }, triggerIcon(row)),
      (row.label || !row.summary) && el("span", { class: row.label ? "name" : "name unnamed" }, titleOf(row)),
      row.id === this.marked && el("span", { class: "mark" }, "A"),
      isHead && el("span", { class: "headmark" }, "head"),
      row.summary && el("span", { class: "summary", title: row.summary, dir: "auto" }, row.summary),
      row.status !== "in_progress" && el("span", { class: `status ${row.status}`, title: row.reason ? `${statusWord(row.status)}: ${row.reason}` : statusWord(row.status) }, icon(row.status, statusWord(row.status))),
      row.pending.length > 0 && el("span", { class: "pending", title: `no result yet: ${row.pending.map((call) => call.name).join(", ")}` }, icon("pending", "pending"), row.pending.length > 1 && row.pending.length),
      el("span", { class: row.summary ? "chips" : "chips grow" }, chips.slice(0, MOST_CHIPS), left > 0 && el("span", { class: "quiet" }, `+${left}`)),
      el("span", { class: "took" }, took === null ? "" : lasting(took)),
      usageBar("tokens", row.usage.tokens, most.tokens, compact),
      usageBar("cost", row.usage.cost, most.cost, money),
    ];
  }
}

/** A name that opens the session, at a checkpoint or at its head. */
export function sessionChip(name, id, title) {
  const open = (event) => {
    event.stopPropagation();
    go({ session: name, id, other: null, pane: id ? "detail" : "timeline" });
  };
  const text = beside(name);
  const whole = text.length <= SHORT_NAME ? " whole" : "";
  return el("button", { class: `chip${whole}`, type: "button", title: `${title}: ${name}${id ? ` at ${shortId(id)}` : ""}`, onclick: open }, icon("fork"), el("span", {}, text));
}

/** A fork is often named after its origin. Then show only the part that it adds. */
function beside(name) {
  const own = view.session;
  const added = own && name.startsWith(own) ? name.slice(own.length).replace(/^[\s\-_./:#]+/, "") : "";
  return added || name;
}

function usageBar(kind, amount, most, word) {
  const fill = el("span", { class: "fill" });
  fill.style.width = most ? `${Math.max((amount / most) * 100, amount ? 2 : 0)}%` : "0";
  return el("span", { class: `bar ${kind}`, title: `${word(amount)} ${kind}` }, amount > 0 && [el("span", { class: "amount" }, word(amount)), el("span", { class: "rail" }, fill)]);
}

/** The placeholder for an empty timeline. */
export function emptyTimeline(title, text) {
  return put(el("div", { class: "empty" }), el("h2", {}, title), el("p", {}, text));
}

