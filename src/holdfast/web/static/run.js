// The journal of a session's run: calls with their times, calls in doubt, and open questions.

import { answerAsked, resolveCall } from "./actions.js";
import { api } from "./api.js";
import { el } from "./dom.js";
import { valueNode } from "./shown.js";
import { age, commandLine, lasting, moment } from "./words.js";

/** The tab. @param {{readOnly: boolean, done: Function}} desk */
export async function showRun(checkpoint, signal, rows, desk) {
  const told = await api.get("run", { session: checkpoint.session }, signal);
  if (!told.length && !told.pending.length && !told.run) {
    return el("div", { class: "empty" }, el("p", {}, "This session has no run with a journal."), el("p", { class: "quiet" }, "session.run() records every model and tool call, so that an agent that was killed goes on where it was."));
  }
  return el("div", { class: "run" },
    told.run && standing(told.run),
    told.pending.map((each) => pendingNode(each, desk)),
    told.length > 0 && el("section", { class: "group" }, el("h3", {}, "Calls ", el("span", { class: "count" }, told.length > told.calls.length ? `the last ${told.calls.length} of ${told.length}` : told.length)),
      el("ol", { class: "calls" }, [...told.calls].reverse().map((call) => madeCall(call, told.calls)))));
}

function standing(run) {
  const how = {
    died: `The run died: process ${run.pid} on ${run.host} is gone.`,
    failed: "The run failed.",
    "in doubt": "The run has stopped at a call that is in doubt.",
    waiting: "The run waits for an answer.",
    ready: "The run has its answer, and can be resumed.",
    "over budget": "The run was halted: its budget is spent.",
    stopped: "The run was stopped by a signal.",
    halted: "The run was halted.",
  }[run.state];
  const calm = ["halted", "stopped", "waiting", "ready", "over budget"].includes(run.state);
  const tells = run.reason && ["failed", "halted", "over budget"].includes(run.state);
  return el("div", { class: calm ? "banner" : "banner warn" }, el("p", {}, how, ` Attempt ${run.attempt}.`),
    tells && el("p", { class: "reason" }, valueNode(run.reason)),
    el("p", { class: "quiet" }, "Go on with ", el("code", {}, commandLine("resume", run.session)), " or session.run() in your program."));
}

function pendingNode(each, desk) {
  const words = { "in doubt": "In doubt", waiting: "Waiting for an answer", running: "Running" };
  const body = [
    el("div", { class: "callhead" }, el("span", { class: "waiting" }, words[each.state] ?? each.state), el("code", { class: "tool" }, each.name), el("span", { class: "quiet", title: moment(each.since) }, age(each.since))),
    each.state === "in doubt" && el("p", {}, "It was begun, and nothing says whether it was done. Look where it would have left a trace, then decide."),
    valueNode(each.arguments),
    el("p", { class: "quiet small" }, "key ", el("code", {}, each.key), ", idempotency key ", el("code", {}, each.idempotency_key)),
  ];
  if (!desk.readOnly && each.state === "in doubt") {
    body.push(el("div", { class: "buttons" },
      el("button", { type: "button", onclick: () => resolveCall(each, "result", desk) }, "It was done…"),
      el("button", { type: "button", onclick: () => resolveCall(each, "rerun", desk) }, "Make it again…"),
      el("button", { type: "button", onclick: () => resolveCall(each, "skip", desk) }, "Leave it out…")));
  }
  if (!desk.readOnly && each.state === "waiting") {
    body.push(el("div", { class: "buttons" }, el("button", { type: "button", class: "primary", onclick: () => answerAsked(each, desk) }, "Answer…")));
  }
  return el("section", { class: each.state === "running" ? "call" : "call open", "aria-label": `${each.state}: ${each.name}` }, body);
}

function madeCall(call, all) {
  const longest = Math.max(...all.map((each) => each.duration ?? 0));
  const fill = el("span", { class: "fill" });
  fill.style.width = longest && call.duration ? `${Math.max((call.duration / longest) * 100, 2)}%` : "0";
  const how = call.success === null ? "no end yet" : call.success ? "" : "failed";
  return el("li", {}, el("details", {},
    el("summary", {}, el("code", { class: "tool" }, call.name), how && el("span", { class: call.success === null ? "waiting" : "bad" }, how),
      el("span", { class: "quiet turn" }, `turn ${call.turn}`), el("span", { class: "took" }, call.duration === null ? "–" : lasting(call.duration)), el("span", { class: "rail" }, fill)),
    el("p", { class: "quiet small" }, `${call.id}, ${moment(call.started)}`),
    el("h4", {}, "Arguments"), valueNode(call.arguments),
    call.error ? [el("h4", {}, "Error"), valueNode(call.error)] : call.success !== null && [el("h4", {}, "Result"), valueNode(call.result)]));
}

