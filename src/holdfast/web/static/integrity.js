// The integrity of a checkpoint: its hashes, the chain that leads to it, and the operations of its session.

import { api } from "./api.js";
import { el } from "./dom.js";
import { icon } from "./icons.js";
import { copyButton, valueNode } from "./shown.js";
import { addressOf } from "./view.js";
import { age, bytes, commandLine, grouped, moment, shortId } from "./words.js";

/** The tab. */
export async function showIntegrity(checkpoint, signal) {
  const [told, operations] = await Promise.all([
    api.get("integrity", { id: checkpoint.id, session: checkpoint.session, seq: checkpoint.seq }, signal),
    api.get("operations", { session: checkpoint.session, limit: 50 }, signal),
  ]);
  const of = told.checkpoint;
  return el("div", { class: "integrity" },
    told.problem === null
      ? el("div", { class: "banner good" }, icon("completed"), el("p", {}, told.as_of === "export" ? "As of the export, it loaded and every byte of it matched its hash. This page cannot check what was changed since." : "It loads, and every byte of it matches its hash."))
      : el("div", { class: "banner warn" }, el("p", {}, told.problem), el("p", { class: "quiet" }, "Its neighbours are not touched by this. ", el("code", {}, commandLine("verify")), " tells what else is damaged.")),
    of.damaged ? knownFacts(of, told.known) : recordFacts(of),
    told.chain.length > 0 && el("section", { class: "group" }, el("h3", {}, "Chain"), el("p", { class: "quiet" }, "Each hash covers the one before, so that nothing in the past can change unseen."), el("ol", { class: "chain" }, told.chain.map(chainLink))),
    el("section", { class: "group" }, el("h3", {}, "Operations ", el("span", { class: "count" }, grouped(operations.length))),
      operations.items.length ? el("ol", { class: "operations" }, operations.items.map(operationRow)) : el("p", { class: "quiet" }, "Nothing was done to this session apart from saving.")));
}

/** Facts about an unreadable checkpoint, from its neighbours and its marks. */
function knownFacts(of, known) {
  const link = (name, id) => id && [el("dt", {}, name), el("dd", {}, el("a", { href: addressOf({ session: of.session, id, other: null, pane: "detail" }) }, shortId(id)))];
  return el("dl", { class: "facts" }, fact("Id", of.id), fact("Number in the session", grouped(of.seq)),
    known?.step && fact("Step", grouped(known.step)), known?.label && fact("Label", known.label),
    known?.tags.length > 0 && fact("Tags", known.tags.join(", ")), link("Before it", known?.ancestor), link("After it", known?.child));
}

function recordFacts(of) {
  return el("dl", { class: "facts" },
    fact("Id", of.id), fact("Number in the session", grouped(of.seq)), fact("Taken", moment(of.created_at)),
    fact("Made by", of.trigger ? `${of.operation}, trigger ${of.trigger}` : of.operation),
    of.run && fact("Run", `${of.run.id}, turn ${of.run.turn}`),
    of.key && fact("Key", of.key), of.child_of && fact("Works for", of.child_of),
    fact("Whole state", bytes(of.size)), fact("Written for it", bytes(of.added)),
    fact("Hash", of.hash), fact("Hash of the state", of.state_hash),
    Object.keys(of.meta ?? {}).length > 0 && [el("dt", {}, "Metadata"), el("dd", {}, valueNode(of.meta))]);
}

function fact(name, value) {
  const text = String(value);
  const long = text.length > 20 && /^[0-9a-z]+$/.test(text);
  return [el("dt", {}, name), el("dd", { class: long ? "mono" : null }, text, long && copyButton(text, `Copy: ${name}`))];
}

function chainLink(link) {
  const where = addressOf({ session: link.session ?? null, id: link.id, other: null, pane: "detail" });
  if (link.damaged) return el("li", { class: "bad" }, `${shortId(link.id)}: ${link.damaged}`);
  return el("li", {}, el("a", { href: where }, `step ${link.step}`), el("code", {}, link.hash.slice(0, 16)));
}

function operationRow(done) {
  return el("li", {}, el("span", { class: "kind" }, done.kind), el("span", {}, done.summary), el("span", { class: "quiet", title: moment(done.created_at) }, age(done.created_at)), el("span", { class: "quiet line" }, done.way_back));
}

