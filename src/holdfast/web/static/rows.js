// The checkpoints of a session as far as they were asked for, the newest first, and how they hang together.

import { api } from "./api.js";
import { Lanes } from "./lanes.js";

const FIRST_PAGE = 200;
const NEXT_PAGE = 1000;

export class Rows {
  /** @param {string} session */
  constructor(session) {
    this.session = session;
    this.head = null;
    this.count = 0;
    this.complete = false;
    this.list = [];
    this.bridges = new Map();
    this.loading = null;
    this.arrange();
  }

  /** What is new at the top, or with `all` everything that was asked for so far, once more. */
  async refresh({ all = false } = {}) {
    const known = this.list[0]?.seq ?? Infinity, lowest = this.list.at(-1)?.seq ?? Infinity;
    const reach = all ? lowest : known;
    const fresh = [];
    let page, before = null;
    do {
      page = await api.get("log", { session: this.session, before, limit: all && before ? NEXT_PAGE : FIRST_PAGE });
      fresh.push(...page.items);
      this.bridge(page);
      before = page.next;
    } while (before !== null && before > reach);
    const below = before === null ? [] : this.list.filter((row) => row.seq < before);
    this.complete = before === null || (this.complete && below.length > 0);
    this.take(fresh.concat(below), page);
  }

  /** The next page below; one at a time. */
  more() {
    if (this.complete || !this.list.length) return Promise.resolve();
    this.loading ??= this.nextPage().finally(() => (this.loading = null));
    return this.loading;
  }

  async nextPage() {
    const before = this.list.at(-1).seq;
    const page = await api.get("log", { session: this.session, before, limit: NEXT_PAGE });
    this.complete = page.next === null;
    this.bridge(page);
    this.take(this.list.concat(page.items.filter((row) => row.seq < before)), page);
  }

  /** Everything down to a number. */
  async reach(seq) {
    while (!this.complete && this.list.length && this.list.at(-1).seq > seq) await this.more();
  }

  /** What lies around damaged checkpoints tells where they were. */
  bridge(page) {
    for (const [id, known] of Object.entries(page.bridges)) this.bridges.set(id, known);
  }

  /** Who came before a checkpoint; null if nobody did, or nothing tells. */
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

  /** The lines that are drawn: checkpoints, what was pruned between them, and where a fork comes from. */
  arrange() {
    this.byId = new Map(this.list.map((row) => [row.id, row]));
    this.path = this.ancestry(this.head);
    this.lines = [];
    this.lineOf = new Map();
    this.tips = [];
    this.width = 1;
    this.most = { tokens: 0, cost: 0 };
    const lanes = new Lanes();
    for (const row of this.list) {
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
  }

  /** The ids from a checkpoint to its first ancestor, as far as they are known. */
  ancestry(id) {
    const found = new Set();
    for (let row = this.byId.get(id); row && !found.has(row.id); row = this.byId.get(this.ancestorOf(row))) found.add(row.id);
    return found;
  }

  /** How many lines there are, those that were not asked for yet included. */
  get length() {
    return this.lines.length + (this.complete ? 0 : Math.max(this.count - this.list.length, 0));
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

  /** How many steps lie between the head and one of its ancestors; null for what is none. */
  stepsBack(id) {
    if (!this.path.has(id) || !this.byId.has(this.head)) return null;
    return this.stepOf(this.byId.get(this.head)) - this.stepOf(this.byId.get(id));
  }
}
