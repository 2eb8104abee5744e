// The open session: its rows, the selection, and their updates.

import { api } from "./api.js";
import { Compare } from "./compare.js";
import { Detail } from "./detail.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { bringBack, stepBack } from "./actions.js";
import { failed, notice, say } from "./notices.js";
import { Rows } from "./rows.js";
import { errorNode } from "./shown.js";
import { emptyTimeline, Timeline } from "./timeline.js";
import { go, isNarrow, view } from "./view.js";
import { plural, titleOf } from "./words.js";

const BREATH = 150;
const LIVING = new Set(["run", "integrity", "usage"]);

export class Desk {
  /** @param {{readOnly: boolean, changed: (session: string) => void}} options */
  constructor({ readOnly, changed }) {
    this.readOnly = readOnly;
    this.changed = changed;
    this.rows = null;
    this.marked = null;
    this.vacant = false;
    this.timeline = new Timeline();
    this.timeline.onError = failed;
    this.detail = new Detail();
    this.compare = new Compare();
    this.title = el("header", { class: "bar-head" });
    this.stage = el("div", { class: "stage" });
    this.node = el("main", { class: "pane timeline-pane", "aria-label": "Timeline" }, this.title, this.stage);
  }

  /** The checkpoint that is looked at. */
  get selected() {
    return view.id ?? this.rows?.head ?? this.rows?.list[0]?.id ?? null;
  }

  /** The view has changed. */
  follow(before) {
    if (view.session !== before.session) this.open();
    else this.select({ reveal: view.id !== before.id });
  }

  async open() {
    if (view.session === null) return this.openById();
    const rows = (this.rows = new Rows(view.session));
    if (view.other) this.marked = view.other;
    this.heading();
    put(this.stage, el("p", { class: "quiet pad", role: "status" }, "Loading…"));
    this.detail.show(view.id, this);
    try {
      await rows.refresh();
      if (this.rows !== rows) return;
      put(this.stage, rows.list.length ? this.timeline.node : emptyTimeline("No checkpoints", "Everything in this session was deleted or pruned."));
      this.select({ reveal: true });
      await this.reach();
      await rows.scale();
      if (this.rows === rows) this.select();
    } catch (error) {
      if (this.rows === rows) put(this.stage, el("div", { class: "pad" }, errorNode(error)));
    }
  }

  /** Whether the store has no session at all. */
  tellVacant(vacant) {
    if (this.vacant === vacant) return;
    this.vacant = vacant;
    if (view.session === null) this.openById();
  }

  /** An address that names a checkpoint alone: its session is looked up. */
  async openById() {
    this.rows = null;
    this.heading();
    this.detail.show(null, this);
    put(this.stage, this.vacant ? emptyTimeline("Nothing here yet", "The first save of an agent appears by itself.") : emptyTimeline("No session is open", "Choose one of the list."));
    if (view.id === null) return;
    try {
      const { session } = await api.get("checkpoint", { id: view.id });
      go({ session }, { replace: true });
    } catch (error) {
      put(this.stage, el("div", { class: "pad" }, errorNode(error)));
    }
  }

  /** Load as far down as the selection lies. */
  async reach() {
    const { rows } = this, id = this.selected;
    if (id === null || rows.byId.has(id)) return;
    const { session, seq } = await api.get("checkpoint", { id });
    if (session !== rows.session) return;
    await rows.reach(seq);
    if (this.rows === rows) this.select({ reveal: true });
  }

  select({ reveal = false, stale = false } = {}) {
    const { rows, selected } = this;
    if (!rows) return;
    if (view.other) this.marked = view.other;
    this.heading();
    this.timeline.show(rows, selected, this.marked);
    if (reveal) this.timeline.reveal(selected);
    this.detail.show(selected, this, { stale });
    if (view.other && selected) this.compare.show(view.other, selected);
    else this.compare.hide();
    if (reveal && selected && !rows.byId.has(selected) && rows.list.length) this.reach().catch(failed);
  }

  heading() {
    const { rows } = this;
    const name = view.session;
    put(this.title,
      el("button", { type: "button", class: "plain back", "aria-label": "Back to the sessions", onclick: () => go({ pane: "sessions" }) }, icon("back")),
      el("h1", { title: name }, name ?? "holdfast"),
      rows && el("span", { class: "quiet" }, plural(rows.count, "checkpoint"), rows.tips.length > 1 && `, ${plural(rows.tips.length, "branch", "branches")}`),
      el("span", { class: "grow" }),
      rows && !this.readOnly && [
        el("button", { type: "button", class: "plain", "aria-label": "Undo the last change", title: "Undo the last change (u)", onclick: () => stepBack(name, this) }, icon("undo")),
        el("button", { type: "button", class: "plain", "aria-label": "Redo", title: "Redo", onclick: () => stepBack(name, this, "redo") }, icon("redo")),
      ]);
  }

  /** Mark a checkpoint; the second one is compared with it. */
  mark(id) {
    if (this.marked === null || view.other) {
      this.marked = id;
      if (view.other) go({ other: null });
      else this.select();
      say("Marked. Choose another checkpoint and press c to compare.");
    } else if (this.marked === id) this.unmark();
    else go({ id, other: this.marked });
  }

  unmark() {
    this.marked = null;
    if (view.other) go({ other: null });
    else this.select();
  }

  step(by) {
    const next = this.rows?.neighbour(this.selected, by);
    if (next) go({ id: next }, { replace: true });
  }

  jump(id) {
    if (id) go({ id }, { replace: true });
  }

  /** Something was done here. */
  done(session) {
    this.changed(session);
    if (session === view.session) this.refresh({ all: true });
  }

  /** Something landed in the store. */
  heard({ checkpoint, operation }) {
    const { session } = checkpoint ?? operation;
    const here = view.session;
    if (session === here) {
      this.refresh({ all: Boolean(operation) });
      if (checkpoint && !checkpoint.damaged) say(`New checkpoint: step ${checkpoint.step}, ${titleOf(checkpoint)}`);
    } else if (checkpoint?.parent_session === here) this.refresh({ all: true });
  }

  /** Ask for new rows, one request at a time, with a pause between. A call during a request is not lost. */
  async refresh({ all = false } = {}) {
    this.wanted = { all: all || Boolean(this.wanted?.all) };
    if (this.refreshing) return;
    this.refreshing = true;
    while (this.wanted && this.rows) {
      const { rows, wanted } = this;
      this.wanted = null;
      try {
        const before = rows.head;
        await rows.refresh(wanted);
        if (this.rows === rows) this.landed(before);
      } catch (error) {
        if (this.rows === rows) this.missing(rows, error);
      }
      await new Promise((resume) => setTimeout(resume, BREATH));
    }
    this.refreshing = false;
  }

  /** Leave a session that was there: it was deleted, or its fork was undone. */
  missing({ session, count }, error) {
    if (error.kind !== "SessionNotFound" || !count) return failed(error);
    go({ session: null, id: null, other: null }, { replace: true });
    notice(`${session} is no longer there.`, { action: this.readOnly ? null : ["Bring it back", () => bringBack(session, this)] });
  }

  /** Take new rows. If the head was selected, select the new head. */
  landed(before) {
    const { rows } = this;
    if (rows.list.length && !this.timeline.node.isConnected) put(this.stage, this.timeline.node);
    const followed = view.id !== null && view.id === before && rows.head !== before && !view.other;
    if (followed && rows.head) go({ id: rows.head }, { replace: true });
    this.select({ reveal: rows.head !== before && this.selected === rows.head, stale: LIVING.has(view.tab) });
    if (this.selected && rows.list.length && !rows.byId.has(this.selected)) this.reach().catch(failed);
  }

  /** The pane that a narrow screen shows. */
  pane() {
    if (!isNarrow()) return "all";
    if (view.other) return "compare";
    return view.pane ?? (view.id ? "detail" : view.session ? "timeline" : "sessions");
  }
}
