// The pane at the right: the details of a checkpoint, in tabs.

import { actionButtons } from "./actions.js";
import { api } from "./api.js";
import { showChanges } from "./changes.js";
import { showUsage } from "./chart.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { showIntegrity } from "./integrity.js";
import { showMessages } from "./messages.js";
import { showRun } from "./run.js";
import { copyButton, errorNode, valueNode } from "./shown.js";
import { sessionChip } from "./timeline.js";
import { showState } from "./tree.js";
import { go, view } from "./view.js";
import { ageNode, bytes, commandLine, grouped, shortId, spent, statusWord, titleOf } from "./words.js";

const TABS = {
  changes: ["Changes", showChanges],
  messages: ["Messages", showMessages],
  state: ["State", showState],
  usage: ["Usage", showUsage],
  run: ["Run", showRun],
  integrity: ["Integrity", showIntegrity],
};
const PATIENCE = 60;

export class Detail {
  constructor() {
    this.shown = null;
    this.head = el("div", { class: "detail-head" });
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "About the checkpoint", onkeydown: (event) => this.arrows(event) },
      Object.entries(TABS).map(([name, [title]]) => el("button", { type: "button", role: "tab", id: `tab-${name}`, "data-tab": name, "aria-controls": "panel", onclick: () => go({ tab: name }, { replace: true }) }, title)));
    this.panel = el("div", { class: "scroll panel", role: "tabpanel", id: "panel", tabindex: "0" });
    this.node = el("section", { class: "pane detail", "aria-label": "Checkpoint" }, this.head, this.tabs, this.panel);
  }

  arrows(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.turn(by);
    this.tabs.querySelector("[aria-selected=true]").focus();
  }

  /** The next tab, or the one before. */
  turn(by) {
    const names = Object.keys(TABS);
    go({ tab: names.at((names.indexOf(currentTab()) + by) % names.length) }, { replace: true });
  }

  /** Show a checkpoint. If it is shown already, load it again only if its session changed. */
  show(id, desk, { stale = false } = {}) {
    this.desk = desk;
    const tab = currentTab();
    for (const button of this.tabs.children) {
      const current = button.dataset.tab === tab;
      button.setAttribute("aria-selected", current ? "true" : "false");
      button.tabIndex = current ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${tab}`);
    const what = `${id} ${tab}`;
    const known = id ? desk.rows?.byId.get(id) : null;
    if (known) this.header(known);
    if (what === this.shown && !stale) return;
    this.shown = what;
    this.asking?.abort();
    this.asking = new AbortController();
    clearTimeout(this.soon);
    if (id === null) this.nothing();
    else this.soon = setTimeout(() => this.fill(id, tab, known, this.asking.signal), PATIENCE);
  }

  async fill(id, tab, known, signal) {
    const dim = setTimeout(() => this.panel.classList.add("waits"), 150);
    try {
      const checkpoint = known ?? (await api.get("checkpoint", { id }, signal));
      if (signal.aborted) return;
      if (!known) this.header(checkpoint);
      const broken = checkpoint.damaged && tab !== "integrity" && tab !== "run";
      const made = broken ? damagedNode(checkpoint) : await TABS[tab][1](checkpoint, signal, this.desk.rows, this.desk);
      if (signal.aborted) return;
      const same = this.filled === `${id} ${tab}`;
      put(this.panel, made);
      if (!same) this.panel.scrollTop = 0;
      this.filled = `${id} ${tab}`;
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) put(this.panel, errorNode(error));
    } finally {
      clearTimeout(dim);
      if (!signal.aborted) this.panel.classList.remove("waits");
    }
  }

  nothing() {
    put(this.head);
    put(this.panel, el("div", { class: "empty" }, el("p", {}, "Choose a checkpoint.")));
    this.filled = null;
  }

  header(of) {
    const { desk } = this;
    const isHead = of.id === desk.rows?.head;
    const marked = desk.marked === of.id;
    put(this.head,
      el("div", { class: "title" }, el("h2", {}, of.damaged ? `Number ${of.seq}` : el("span", { class: "step" }, `Step ${grouped(of.step)}`), el("span", { class: of.label || of.damaged ? "" : "unnamed" }, titleOf(of))), isHead && el("span", { class: "headmark" }, "head"), copyButton(of.id, `Copy the id ${of.id}`, shortId(of.id))),
      of.damaged ? el("p", { class: "bad" }, of.damaged) : headFacts(of),
      el("div", { class: "buttons" }, actionButtons(of, desk),
        el("button", { type: "button", title: "Mark it, then another to compare with (c)", "aria-pressed": marked ? "true" : "false", onclick: () => desk.mark(of.id) }, desk.marked && !marked ? "Compare with A" : marked ? "Marked as A" : "Compare")));
  }
}

function currentTab() {
  return Object.hasOwn(TABS, view.tab ?? "") ? view.tab : "changes";
}

function headFacts(of) {
  return [
    el("p", { class: "facts" },
      el("span", { class: `status ${of.status}` }, icon(of.status), statusWord(of.status)),
      ageNode(of.created_at), of.agent && el("span", {}, of.agent),
      el("span", {}, spent(of.usage)), el("span", { title: "Written for it, of the whole state" }, `+${bytes(of.added)} of ${bytes(of.size)}`)),
    of.reason && el("p", { class: "reason" }, valueNode(of.reason)),
    of.hint && el("p", { class: "quiet" }, "For whoever resumes: ", typeof of.hint === "string" ? of.hint : valueNode(of.hint)),
    of.pending.length > 0 && el("p", { class: "waiting status" }, icon("pending"), `no result yet: ${of.pending.map((call) => call.name).join(", ")}`),
    (of.tags.length > 0 || of.forks?.length > 0) && el("p", { class: "chips" }, of.tags.map((tag) => el("span", { class: "tag" }, tag)), (of.forks ?? []).map((name) => sessionChip(name, null, "Open the fork"))),
  ];
}

function damagedNode(of) {
  return el("div", { class: "problem" },
    el("p", { class: "bad" }, "This checkpoint cannot be read."),
    el("p", {}, of.damaged),
    el("p", { class: "quiet" }, "Its neighbours are not touched by this. ", el("code", {}, commandLine("repair")), " restores what can be."));
}
