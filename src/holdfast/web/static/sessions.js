// The list of sessions at the left, its filters, and the search.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { searchCheckpoints } from "./search.js";
import { addressOf, go, view } from "./view.js";
import { ageNode, grouped, plural, spent, statusWord } from "./words.js";

const PAGE = 200;
const FILTERS = ["text", "status", "agent", "tag"];

export class Sessions {
  /**
   * @param {string[]} statuses @param {(error: Error) => void} failed
   * @param {(vacant: boolean) => void} vacant told whether there is none at all
   */
  constructor(statuses, failed, vacant) {
    this.failed = failed;
    this.vacant = vacant;
    this.known = { agents: new Set(), tags: new Set() };
    this.left = {};
    this.items = [];
    this.next = null;
    this.asked = 0;
    this.totals = new Map();
    this.queue = [];
    this.busy = 0;
    this.input = el("input", {
      type: "search", placeholder: "Search  /", "aria-label": "Search sessions, labels, tags, metadata (key=value) and messages",
      value: view.text ?? "", oninput: () => this.typed({ text: this.input.value || null }),
      onkeydown: (event) => event.key === "Escape" && this.typed({ text: (this.input.value = "") || null }),
    });
    const statusNames = statuses.map((status) => el("option", { value: status, selected: view.status === status }, statusWord(status)));
    this.status = el("select", { "aria-label": "Status", onchange: () => go({ status: this.status.value || null }) }, el("option", { value: "" }, "status"), statusNames);
    this.agent = el("input", { type: "text", placeholder: "agent", "aria-label": "Agent", list: "known-agents", value: view.agent ?? "", oninput: () => this.typed({ agent: this.agent.value || null }) });
    this.tag = el("input", { type: "text", placeholder: "tag", "aria-label": "Tag", list: "known-tags", value: view.tag ?? "", oninput: () => this.typed({ tag: this.tag.value || null }) });
    this.suggested = { agents: el("datalist", { id: "known-agents" }), tags: el("datalist", { id: "known-tags" }) };
    this.list = el("ul", { class: "sessions", "aria-label": "Sessions" });
    this.found = el("section", { class: "found", "aria-label": "Checkpoints found", hidden: true });
    this.more = el("button", { type: "button", class: "more", hidden: true, onclick: () => this.page() }, "More sessions");
    this.node = el("nav", { class: "pane sessions-pane", "aria-label": "Sessions" },
      el("div", { class: "filters" }, this.input, el("div", { class: "facets" }, this.status, this.agent, this.tag), Object.values(this.suggested)),
      el("div", { class: "scroll" }, this.found, this.list, this.more));
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.wantTotals(entry.target.dataset.name);
    });
  }

  typed(changes) {
    clearTimeout(this.typing);
    this.unsaid = { ...this.unsaid, ...changes };
    this.typing = setTimeout(() => {
      const said = this.unsaid;
      this.unsaid = {};
      go(said, { replace: true });
    }, 200);
  }

  /** The view has changed. */
  follow(before) {
    if (FILTERS.some((name) => view[name] !== before[name])) {
      for (const [name, field] of [["text", this.input], ["status", this.status], ["agent", this.agent], ["tag", this.tag]]) {
        if (document.activeElement !== field) field.value = view[name] ?? "";
      }
      this.refresh();
      this.search();
    } else if (view.session !== before.session) this.draw();
  }

  /** All that are shown, once more. */
  async refresh() {
    const asked = ++this.asked;
    try {
      const limit = Math.max(PAGE, Math.min(this.items.length, 1000));
      const page = await api.get("sessions", { ...this.query(), limit });
      if (asked !== this.asked) return;
      [this.items, this.next, this.error, this.left] = [page.items, page.next, null, page.left];
      this.suggest(page.items);
      if (!FILTERS.some((name) => view[name])) this.vacant(!page.items.length);
    } catch (error) {
      this.error = error;
    }
    this.draw();
  }

  async page() {
    const asked = ++this.asked;
    try {
      const page = await api.get("sessions", { ...this.query(), after: this.next, limit: PAGE });
      if (asked !== this.asked) return;
      const known = new Set(this.items.map((item) => item.name)); // one that was active since came up
      const items = this.items.concat(page.items.filter((item) => !known.has(item.name)));
      [this.items, this.next, this.left] = [items, page.next, { ...this.left, ...page.left }];
      this.suggest(page.items);
      this.draw();
    } catch (error) {
      this.failed(error);
    }
  }

  /** Agents and tags that were seen are offered where one may type them. */
  suggest(items) {
    for (const { agent, head } of items) {
      if (agent) this.known.agents.add(agent);
      for (const tag of head?.tags ?? []) this.known.tags.add(tag);
    }
    for (const [kind, node] of Object.entries(this.suggested)) put(node, [...this.known[kind]].sort().map((value) => el("option", { value })));
  }

  query() {
    return { text: view.text, status: view.status, agent: view.agent, tag: view.tag, order: "active" };
  }

  draw() {
    const inList = this.list.contains(document.activeElement) ? document.activeElement.closest("li")?.dataset.name : null;
    this.seen.disconnect();
    put(this.list, this.ordered().map(([item, depth]) => this.row(item, depth)));
    for (const row of this.list.children) this.seen.observe(row);
    if (this.error) put(this.list, el("li", { class: "empty" }, el("p", { class: "bad" }, this.error.message), this.error.hint && el("p", {}, this.error.hint)));
    else if (!this.items.length) put(this.list, el("li", { class: "empty" }, ...this.nothing()));
    this.more.hidden = this.next === null;
    if (inList !== null) [...this.list.children].find((row) => row.dataset.name === inList)?.firstChild.focus();
  }

  nothing() {
    if (FILTERS.some((name) => view[name])) return [el("p", {}, view.text ? "No session has this in its name." : "No session matches."), el("button", { type: "button", onclick: () => go({ text: null, status: null, agent: null, tag: null }) }, "Clear the filters")];
    return [el("p", {}, "The store has no session yet."), el("p", { class: "quiet" }, "The first save of an agent appears here by itself.")];
  }

  /** The active first, and those that work for another below it. */
  ordered() {
    const { items } = this;
    const names = new Set(items.map((item) => item.name));
    const below = new Map();
    const roots = [];
    for (const item of items) {
      const parent = item.head?.child_of ?? null;
      if (parent !== null && parent !== item.name && names.has(parent)) below.set(parent, [...(below.get(parent) ?? []), item]);
      else roots.push(item);
    }
    const out = [];
    const visited = new Set();
    const add = (item, depth) => {
      if (visited.has(item.name)) return;
      visited.add(item.name);
      out.push([item, depth]);
      for (const child of below.get(item.name) ?? []) add(child, depth + 1);
    };
    for (const item of [...roots, ...items]) add(item, 0);
    return out;
  }

  row(item, depth) {
    const { head } = item;
    const status = item.damaged || head?.damaged ? "damaged" : this.left[item.name] ?? head?.status ?? "in_progress";
    const current = item.name === view.session;
    const link = el("a", { href: addressOf({ session: item.name, id: null, other: null, pane: "timeline" }), "aria-current": current ? "true" : null, class: "session" },
      el("span", { class: `dot ${this.left[item.name] ? "left" : status}`, role: "img", "aria-label": statusWord(status), title: head?.reason ? `${statusWord(status)}: ${head.reason}` : statusWord(status) }),
      el("span", { class: "name", title: item.name }, depth > 0 && icon("child", "works for the one above"), item.name),
      el("span", { class: "when" }, head?.created_at ? ageNode(head.created_at) : ""),
      el("span", { class: "facts" },
        item.agent && el("span", { class: "agent" }, item.agent),
        el("span", { title: plural(item.checkpoints, "checkpoint") }, head?.step ? `step ${grouped(head.step)}` : plural(item.checkpoints, "checkpoint")),
        el("span", { class: "spent" }, this.spentText(item.name))),
      item.damaged && el("span", { class: "bad line" }, item.damaged),
      head?.tags?.length > 0 && el("span", { class: "chips line" }, head.tags.map((tag) => el("span", { class: "tag" }, tag))));
    return el("li", { "data-name": item.name, class: depth > 0 ? "below" : null }, link);
  }

  spentText(name) {
    const known = this.totals.get(name);
    return known ? spent(known.total) : "";
  }

  /** Load the cost of a session when its row is seen, two at a time. */
  wantTotals(name) {
    const head = this.items.find((item) => item.name === name)?.head?.id ?? null;
    if (this.totals.get(name)?.head === head || this.queue.includes(name)) return;
    this.queue.push(name);
    this.askTotals();
  }

  async askTotals() {
    if (this.busy >= 2 || !this.queue.length) return;
    this.busy++;
    const name = this.queue.shift();
    const head = this.items.find((item) => item.name === name)?.head?.id ?? null;
    try {
      const { total } = await api.get("totals", { session: name });
      this.totals.set(name, { head, total });
      const row = [...this.list.children].find((each) => each.dataset.name === name);
      if (row) put(row.querySelector(".spent"), spent(total));
    } catch (error) {
      this.totals.set(name, { head, total: { tokens: 0, cost: 0 }, error });
    }
    this.busy--;
    this.askTotals();
  }

  async search() {
    this.searching?.abort();
    this.found.hidden = !view.text?.trim();
    if (this.found.hidden) return;
    this.searching = new AbortController();
    await searchCheckpoints(this.found, view, this.searching.signal);
  }
}
