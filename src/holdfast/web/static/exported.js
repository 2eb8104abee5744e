// A page without a server: its requests are answered from the data in the page.

import { Refused, api } from "./api.js";
import { CONVERSATION_PLACES } from "./conversation.js";
import { childAt, differencesOf, entriesOf, excerptOf, holdsPair, isMarked, sketchOf } from "./inside.js";
import { isObject } from "./values.js";

class Exported {
  constructor(data) {
    this.data = data;
    this.known = new Map();
    this.bridges = {};
    for (const log of Object.values(data.logs)) {
      Object.assign(this.bridges, log.bridges);
      for (const row of log.items) this.known.set(row.id, row);
    }
    this.unpacked = new Map();
  }

  /** Refuses a checkpoint whose state is not here. */
  check(id) {
    this.checkpoint({ id });
    if (!(id in this.data.states)) {
      const problem = this.data.problems[id] ?? "this state was not exported";
      throw new Refused({ error: "Corrupt", message: problem, hint: null }, 500);
    }
  }

  /** A whole state, built from the pool. */
  state(id) {
    this.check(id);
    if (!this.unpacked.has(id)) {
      if (this.unpacked.size > 8) this.unpacked.clear();
      this.unpacked.set(id, this.unpack(this.data.states[id]));
    }
    return this.unpacked.get(id);
  }

  unpack(packed) {
    if (Array.isArray(packed)) return packed.map((each) => this.unpack(each));
    if (!isObject(packed)) return packed;
    if ("$at" in packed) return this.unpack(this.data.pool[packed.$at]);
    if ("$items" in packed) return this.itemsOf("$items", packed.$items).map((item) => this.item(item));
    if ("$entries" in packed) return Object.fromEntries(this.itemsOf("$entries", packed.$entries).map(([key, item]) => [key, this.item(item)]));
    return Object.fromEntries(Object.entries(packed).map(([key, each]) => [key, this.unpack(each)]));
  }

  /** The items in some extents of streams. */
  itemsOf(kind, extents) {
    return extents.flatMap(([stream, first, count]) => {
      const [start, items] = this.data[kind][stream].findLast(([start]) => start <= first);
      return items.slice(first - start, first - start + count);
    });
  }

  item(item) {
    return isObject(item) && "$packed" in item ? this.unpack(item.$packed) : item;
  }

  valueAt(id, path) {
    let value = this.state(id);
    for (const step of path ?? []) {
      const inside = childAt(value, step);
      if (inside === undefined) throw absent(`the state has nothing at ${JSON.stringify(path)}`);
      value = inside;
    }
    return value;
  }

  session(name) {
    const found = this.data.sessions.find((session) => session.name === name);
    if (!found) throw absent(`there is no session ${JSON.stringify(name)} in this file`);
    return found;
  }

  /** From a checkpoint to the first one, as far as this file has them. */
  *ancestors(id) {
    for (let row = this.known.get(id); row; row = this.known.get((row.damaged ? this.bridges[row.id] : row)?.ancestor)) if (!row.damaged) yield row;
  }

  // -- requests --------------------------------------------------------------------------------

  about() {
    return this.data.about;
  }

  sessions({ agent, status, tag, label, text }) {
    const wanted = (session) => {
      const head = session.head ?? {};
      return (!agent || session.agent === agent) && (!status || head.status === status) && (!label || head.label === label)
        && (!tag || head.tags?.includes(tag)) && (!text || `${session.name} ${session.agent ?? ""}`.toLowerCase().includes(text.toLowerCase()));
    };
    const active = (session) => session.head?.created_at ?? "";
    const items = this.data.sessions.filter(wanted).sort((a, b) => (active(a) < active(b) ? 1 : -1));
    return { items, next: null, left: {} };
  }

  totals({ session }) {
    this.session(session);
    return this.data.totals[session];
  }

  log({ session, before, limit }) {
    this.session(session);
    const log = this.data.logs[session];
    const below = before ? log.items.filter((row) => row.seq < before) : log.items;
    const items = below.slice(0, limit ?? 200);
    return { ...log, items, next: items.length < below.length ? items.at(-1).seq : null };
  }

  checkpoint({ id }) {
    const found = this.known.get(id);
    if (!found) throw absent(`there is no checkpoint ${id} in this file`);
    return found;
  }

  value({ id, path }) {
    return this.valueAt(id, path);
  }

  /** `state` of the API: a part, with some of its entries. */
  part({ id, path, start = 0, limit = 100 }) {
    const value = this.valueAt(id, path);
    const pairs = entriesOf(value).slice(start, start + limit);
    return { ...sketchOf(value), start, items: pairs.map(([key, item]) => ({ key, ...sketchOf(item) })) };
  }

  messages({ id, path, start, limit = 50 }) {
    const paths = path ? [path] : CONVERSATION_PLACES;
    const state = this.state(id);
    const found = paths.find((steps) => Array.isArray(steps.reduce((at, step) => childAt(at, step), state)));
    if (!found) throw absent("the state has no list of messages");
    const list = this.valueAt(id, found);
    const first = Math.min(start ?? Math.max(list.length - limit, 0), list.length);
    return { path: found, length: list.length, start: first, items: list.slice(first, first + limit) };
  }

  changes({ id }) {
    this.check(id);
    return this.data.changes[id];
  }

  diff({ a, b }) {
    const [left, right] = [[...this.ancestors(a)], [...this.ancestors(b)]];
    const mine = new Set(left.map((row) => row.id));
    const meeting = right.find((row) => mine.has(row.id));
    const way = (rows) => rows.slice(0, meeting ? rows.indexOf(rows.find((row) => row.id === meeting.id)) : rows.length);
    const cost = (rows) => ({
      tokens: rows.reduce((sum, row) => sum + row.usage.tokens, 0), cost: rows.reduce((sum, row) => sum + row.usage.cost, 0),
    });
    const changes = differencesOf(this.state(a), this.state(b));
    return {
      a: this.checkpoint({ id: a }), b: this.checkpoint({ id: b }), ancestor: meeting?.id ?? null, changes,
      steps: { a: way(left).length, b: way(right).length }, usage: { a: cost(way(left)), b: cost(way(right)) },
    };
  }

  way({ id, until, limit = 100 }) {
    const items = [];
    for (const row of this.ancestors(id)) {
      if (row.id === until || items.length === limit) return { items, more: row.id !== until };
      items.push(row);
    }
    return { items, more: false };
  }

  blame({ id, path }) {
    const after = this.valueAt(id, path);
    const same = JSON.stringify(after);
    let found = this.checkpoint({ id });
    for (const row of this.ancestors(found.ancestor)) {
      const before = path.reduce((at, step) => childAt(at, step), this.state(row.id));
      if (before === undefined) break;
      if (JSON.stringify(before) !== same) return { checkpoint: found, before, after };
      found = row;
    }
    return { checkpoint: found, after };
  }

  chart({ session, id }) {
    let tokens = 0, cost = 0;
    const path = [...this.ancestors(id ?? this.data.logs[session].head)].reverse();
    const points = path.map((row) => {
      tokens += row.usage.tokens;
      cost += row.usage.cost;
      return { id: row.id, step: row.step, tokens, cost, size: row.size };
    });
    const every = Math.max(Math.floor(points.length / 400), 1);
    return { points: points.filter((_, n) => n % every === 0 || n === points.length - 1) };
  }

  run({ session }) {
    return this.data.runs[session];
  }

  operations({ session }) {
    return this.data.operations[session];
  }

  integrity({ id }) {
    const chain = [];
    for (const row of this.ancestors(id)) {
      if (row.id !== id) chain.push(row);
      if (chain.length === 12) break;
    }
    const bridge = this.bridges[id];
    return {
      as_of: "export", checkpoint: this.checkpoint({ id }), known: bridge ? { ...bridge, label: null, tags: [], child: null } : null, problem: this.known.get(id).damaged ?? this.data.problems[id] ?? null,
      chain: chain.map(({ id, damaged, step, hash, session }) => ({ id, damaged, step, hash, session })),
    };
  }

  search({ label, tag, text, mark, meta, agent, status, limit = 30 }) {
    const [, key, wanted] = /^([^=]+)=(.*)$/s.exec(meta ?? "") ?? [];
    const holds = (row) => !row.damaged && (!key || holdsPair(row.meta, key, wanted)) && (!mark || isMarked(row, mark)) && (!label || row.label === label) && (!tag || row.tags.includes(tag))
      && (!agent || row.agent === agent) && (!status || row.status === status);
    const textOf = (id) => (id in this.data.states ? excerptOf(this.state(id), text) : null);
    const items = [];
    for (const row of [...this.known.values()].sort((a, b) => (a.id < b.id ? 1 : -1))) {
      if (!holds(row)) continue;
      const found = text ? textOf(row.id) : ["", 0, 0];
      if (found === null || (text && textOf(row.ancestor) !== null)) continue;
      if (items.length === limit) break;
      const [snippet, start, end] = found;
      items.push({ session: row.session, checkpoint: row, path: [], snippet, start, end });
    }
    return { items, next: null };
  }
}

function absent(message) {
  return new Refused({ error: "NotFound", message, hint: "An exported file holds only the sessions it was made of." }, 404);
}

function answerFromFile() {
  const exported = new Exported(JSON.parse(document.getElementById("exported").textContent));
  api.get = async (name, params = {}) => {
    const given = Object.fromEntries(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
    return exported[name === "state" ? "part" : name](given);
  };
  api.post = async () => {
    throw new Refused({ error: "ReadOnly", message: "This is a file: nothing can be changed here.", hint: null }, 403);
  };
  api.listen = () => {};
}

answerFromFile();
