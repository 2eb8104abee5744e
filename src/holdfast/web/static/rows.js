// The checkpoints of a session as far as they were asked for, the newest first, and how they hang together.

import { api } from "./api.js";
import { Lanes } from "./lanes.js";

const FIRST_PAGE = 200;
const NEXT_PAGE = 1000;
const AROUND_IT = 200;
const AGAIN = 2000;

export class Rows {
  /** @param {string} session */
  constructor(session) {
    this.session = session;
    this.head = null;
    this.count = 0;
    this.complete = false;
    this.list = [];
    this.bridges = new Map();
    this.ranges = [];
    this.loading = null;
    this.whole = { tokens: 0, cost: 0 };
    this.arrange();
  }

  /** Bars are drawn to the scale of the whole session, also of rows that were not asked for yet. */
  async scale() {
    if (this.complete) return;
    try {
      this.whole = (await api.get("totals", { session: this.session })).most;
    } catch {
      return; // damaged: what is loaded is all that is known
    }
    this.arrange();
  }

  /** Load new rows at the top, or with `all` every row again that was loaded so far. */
  async refresh({ all = false } = {}) {
    const known = this.list[0]?.seq ?? Infinity, lowest = this.list.at(-1)?.seq ?? Infinity;
    // Rows far below are loaded when they come into view.
    const reach = all ? Math.max(lowest, known - AGAIN) : known;
    const fresh = [];
    let page, before = null;
    do {
      page = await api.get("log", { session: this.session, before, limit: all && before ? NEXT_PAGE : FIRST_PAGE });
      fresh.push(...page.items);
      this.bridge(page);
      before = page.next;
    } while (before !== null && before > reach);
    const below = before === null || all ? [] : this.list.filter((row) => row.seq < before);
    this.complete = before === null || (this.complete && below.length > 0);
    const read = [fresh[0]?.seq ?? 0, before ?? 1];
    this.ranges = joined([read, ...(below.length ? this.ranges : [])]);
    this.take(fresh.concat(below), page);
  }

  /** The next page below; one at a time. */
  more() {
    if (this.complete || !this.list.length) return Promise.resolve();
    return this.once(() => this.nextPage());
  }

  async nextPage() {
    const before = this.list.at(-1).seq;
    const page = await api.get("log", { session: this.session, before, limit: NEXT_PAGE });
    this.complete = page.next === null;
    this.bridge(page);
    this.ranges = joined([...this.ranges, [before, page.next ?? 1]]);
    this.take(this.list.concat(page.items.filter((row) => row.seq < before)), page);
  }

  /** So that a number is among them: what lies between is left out if that can be, or all is asked for. */
  async reach(seq) {
    if (this.list.length && this.lowest - seq > NEXT_PAGE) await this.leap(seq);
    while (!this.complete && this.list.length && this.lowest > seq) await this.more();
  }

  get lowest() {
    return this.list.at(-1)?.seq ?? Infinity;
  }

  /** Load the missing rows at a line of the page. */
  async fillAt(n) {
    let above = n;
    while (above > 0 && !this.lines[above]) above -= 1;
    const seq = Math.max((this.lines[above]?.row.seq ?? this.lowest) - (n - above), 1);
    const hole = this.ranges.findIndex(([high, low], k) => low > seq && (this.ranges[k + 1]?.[0] ?? -1) >= 0 && this.ranges[k + 1][0] < seq);
    if (hole >= 0) return this.once(() => this.fillHole(this.ranges[hole][1], this.ranges[hole + 1][0], seq));
    if (this.lowest - seq > NEXT_PAGE && !this.branched) {
      await this.once(() => this.leap(seq));
      if (this.lowest <= seq) return undefined;
    }
    return this.more();
  }

  once(ask) {
    this.loading ??= ask().finally(() => (this.loading = null));
    return this.loading;
  }

  async fillHole(above, below, seq) {
    const before = Math.min(seq + AROUND_IT, above);
    const page = await api.get("log", { session: this.session, before, limit: AROUND_IT * 2 });
    const low = Math.max(page.next ?? 1, below);
    this.bridge(page);
    this.ranges = joined([...this.ranges, [before, low]]);
    const fresh = page.items.filter((row) => row.seq < above && row.seq > below);
    this.take([...this.list.filter((row) => row.seq >= above), ...fresh, ...this.list.filter((row) => row.seq <= below)], page);
  }

  /**
   * The rows around a number far below, without those between. They can be left out if all of them lie on one
   * line: then as many steps lie between its ends as numbers.
   */
  async leap(seq) {
    const page = await api.get("log", { session: this.session, before: seq + AROUND_IT, limit: AROUND_IT * 2 });
    const last = this.list.at(-1), first = page.items[0];
    this.bridge(page);
    const straight = this.openLanes === 1 && first && last.seq > first.seq && this.stepOf(last) - this.stepOf(first) === last.seq - first.seq;
    if (!straight) {
      this.branched = true;
      return;
    }
    this.complete = page.next === null;
    this.ranges = joined([...this.ranges, [first.seq, page.next ?? 1]]);
    this.take(this.list.concat(page.items), page);
  }

  /** Take the facts from the neighbours of damaged checkpoints, which place them in the tree. */
  bridge(page) {
    for (const [id, known] of Object.entries(page.bridges)) this.bridges.set(id, known);
  }

  /** The ancestor of a checkpoint; null if it has none, or if it is unknown. */
  ancestorOf(row) {
    return (row.damaged ? this.bridges.get(row.id) : row)?.ancestor ?? null;
  }

  stepOf(row) {
    return (row.damaged ? this.bridges.get(row.id) : row)?.step ?? 0;
  }

  take(list, page) {
    this.list = list;
    this.head = page.head;
    this.count = page.count;
    this.arrange();
  }

  /** Make the lines to draw: checkpoints, gaps of pruned checkpoints, and origins of forks. */
  arrange() {
    this.byId = new Map(this.list.map((row) => [row.id, row]));
    this.path = this.ancestry(this.head);
    this.lines = [];
    this.lineOf = new Map();
    this.tips = [];
    this.width = 1;
    this.most = { ...this.whole };
    const lanes = new Lanes();
    let range = 0;
    this.left = 0;
    for (const row of this.list) {
      while (range < this.ranges.length - 1 && row.seq < this.ranges[range][1] && row.seq <= this.ranges[range + 1][0]) {
        const left = Math.max(this.ranges[range][1] - this.ranges[range + 1][0] - 1, 0);
        this.lines.length += left;
        this.left += left;
        lanes.skipTo(row.id);
        range += 1;
      }
      const foreign = !row.damaged && row.parent_session !== null && row.parent_session !== row.session;
      const parent = foreign ? null : this.ancestorOf(row);
      const place = lanes.row(row.id, parent, this.path.has(row.id));
      if (place.tip) this.tips.push(row.id);
      this.lineOf.set(row.id, this.lines.length);
      this.lines.push({ kind: "checkpoint", row, place: { ...place, down: place.down || foreign } });
      this.width = Math.max(this.width, place.width);
      if (row.damaged) continue;
      if (row.pruned) this.lines.push({ kind: "pruned", row, place: lanes.below(place) });
      if (foreign) this.lines.push({ kind: "origin", row, place: lanes.below(place) });
      this.most.tokens = Math.max(this.most.tokens, row.usage.tokens);
      this.most.cost = Math.max(this.most.cost, row.usage.cost);
    }
    this.openLanes = lanes.open;
    // As many as there would be lines without those for what was pruned, and for origins.
    this.spanned = this.list.length + this.left;
  }

  /** The ids from a checkpoint to its first ancestor, as far as they are known. */
  ancestry(id) {
    const found = new Set();
    let row = this.byId.get(id);
    while (row && !found.has(row.id)) {
      found.add(row.id);
      const above = this.ancestorOf(row);
      row = this.byId.get(above) ?? (above ? this.beyond(row.seq) : null);
    }
    return found;
  }

  /** The point where a line continues whose next rows were left out. */
  beyond(seq) {
    const n = this.ranges.findIndex(([high, low]) => seq <= high && seq >= low);
    const next = this.ranges[n + 1];
    return next && this.list.find((row) => row.seq <= next[0]);
  }

  /** How many lines there are, those that were not asked for yet included. */
  get length() {
    return this.complete ? this.lines.length : Math.max(this.lines.length, this.lines.length - this.spanned + this.count);
  }

  /** Seconds since the parent was taken; null if that is not known. */
  took(row) {
    const before = this.byId.get(row.ancestor);
    if (!before || before.damaged || row.damaged) return null;
    return Math.max(Date.parse(row.created_at) - Date.parse(before.created_at), 0) / 1000;
  }

  /** The checkpoint above (-1) or below (1) another, by their order on the page. */
  neighbour(id, by) {
    let n = this.lineOf.get(id);
    if (n === undefined) return this.list[0]?.id ?? null;
    do n += by;
    while (this.lines[n] && this.lines[n].kind !== "checkpoint");
    return this.lines[n]?.row.id ?? null;
  }

  /** The tip of the next branch, or of the one before. */
  branch(id, by) {
    const here = this.lines[this.lineOf.get(id)]?.place.branch ?? 0;
    return this.tips.at((here + by) % this.tips.length) ?? null;
  }

  /** The number of steps between the head and one of its ancestors; null for other checkpoints. */
  stepsBack(id) {
    if (!this.path.has(id) || !this.byId.has(this.head)) return null;
    return this.stepOf(this.byId.get(this.head)) - this.stepOf(this.byId.get(id));
  }
}

/** Spans of numbers, [high, low] each, the highest first; those that touch are one. */
function joined(ranges) {
  const out = [];
  for (const [high, low] of [...ranges].sort((a, b) => b[0] - a[0])) {
    const last = out.at(-1);
    if (last && high >= last[1] - 1) last[1] = Math.min(last[1], low);
    else out.push([high, low]);
  }
  return out;
}
