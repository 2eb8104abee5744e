// Dialogs for everything that changes the store. Each says what will happen, and shows the command that does the same.

import { api } from "./api.js";
import { el, put } from "./dom.js";
import { failed, notice } from "./notices.js";
import { copyButton, errorNode } from "./shown.js";
import { upcomingWords } from "./undoing.js";
import { go } from "./view.js";
import { commandLine, grouped, plural, shortId, titleOf } from "./words.js";

/**
 * Ask before something is done. `send` does it; what it refuses is shown in the dialog.
 * @param {{title: string, says: any[], fields?: Node[], command: () => string, verb: string,
 *   send: () => Promise<any>}} asked
 */
function askFirst({ title, says, fields = [], command, verb, send }) {
  const line = el("code", {});
  const copy = el("span", {});
  const trouble = el("div", {});
  const tell = () => {
    put(line, command());
    put(copy, copyButton(command(), "Copy the command"));
  };
  const confirm = el("button", { type: "submit", class: "primary" }, verb);
  const dialog = el("dialog", { "aria-label": title, onclose: () => dialog.remove() },
    el("form", {
      method: "dialog",
      oninput: tell,
      onsubmit: async (event) => {
        event.preventDefault();
        confirm.disabled = true;
        try {
          await send();
          dialog.close();
        } catch (error) {
          put(trouble, errorNode(error));
          confirm.disabled = false;
        }
      },
    },
    el("h2", {}, title), says.map((text) => el("p", {}, text)), fields, trouble,
    el("div", { class: "command" }, el("span", { class: "quiet" }, "The same in a terminal"), el("div", {}, line, copy)),
    el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), confirm)));
  tell();
  document.body.append(dialog);
  dialog.showModal();
  (dialog.querySelector("input, textarea") ?? confirm).focus();
}

function field(label, input) {
  return el("label", { class: "field" }, el("span", {}, label), input);
}

/** Words of a command; a "--" before the first that looks like an option. */
function typed(name, session, ...words) {
  const guard = words.some((word) => word.startsWith("-")) ? ["--"] : [];
  return commandLine(name, "-s", session, ...guard, ...words);
}

export function forkAt(checkpoint, desk) {
  const name = el("input", { type: "text", required: true, value: `${checkpoint.session}-fork` });
  askFirst({
    title: "Fork",
    says: [`A new session begins with the state at step ${grouped(checkpoint.step)}, ${titleOf(checkpoint)}. It shares all data with this one, and costs what it adds.`, `${checkpoint.session} is not changed.`],
    fields: [field("Name of the new session", name)],
    command: () => typed("fork", checkpoint.session, checkpoint.id, name.value),
    verb: "Fork",
    send: async () => {
      const made = await api.post("fork", { id: checkpoint.id, name: name.value });
      notice(`${made.session} begins at step ${grouped(checkpoint.step)}.`);
      desk.done(made.session);
      go({ session: made.session, id: null, other: null, pane: "timeline" });
    },
  });
}

export function rewindTo(checkpoint, desk) {
  const back = desk.rows?.stepsBack(checkpoint.id) ?? null;
  const moves = back === null ? `The head moves to step ${grouped(checkpoint.step)}, on another branch.` : `The head moves back ${plural(back, "step")}, to step ${grouped(checkpoint.step)}.`;
  askFirst({
    title: "Rewind",
    says: [`${moves} Nothing is deleted: the next save makes a branch.`, "What the agent did to the outside world is not reversed."],
    command: () => typed("rewind", checkpoint.session, checkpoint.id),
    verb: "Rewind",
    send: async () => {
      await api.post("rewind", { session: checkpoint.session, id: checkpoint.id });
      notice(`The head of ${checkpoint.session} is at step ${grouped(checkpoint.step)}.`, { action: ["Undo", () => undoNow(checkpoint.session, desk)] });
      desk.done(checkpoint.session);
    },
  });
}

export function tagIt(checkpoint, desk) {
  mark(checkpoint, desk, "tag", "A tag is added. Whoever searches for it finds this checkpoint, and pruning keeps it.", "");
}

export function labelIt(checkpoint, desk) {
  mark(checkpoint, desk, "label", checkpoint.label ? `The label takes the place of “${checkpoint.label}”.` : "The checkpoint gets a label, by which it can be found and loaded.", checkpoint.label ?? "");
}

function mark(checkpoint, desk, kind, says, value) {
  const input = el("input", { type: "text", required: true, value });
  const title = kind === "tag" ? "Tag" : "Label";
  askFirst({
    title,
    says: [says, "The state and its hash stay as they are."],
    fields: [field(title, input)],
    command: () => typed(kind, checkpoint.session, checkpoint.id, input.value),
    verb: title,
    send: async () => {
      await api.post(kind, { id: checkpoint.id, [kind]: input.value });
      notice(`Step ${grouped(checkpoint.step)} has the ${kind} ${input.value}.`, { action: ["Undo", () => undoNow(checkpoint.session, desk)] });
      desk.done(checkpoint.session);
    },
  });
}

/** Ask the server for the effect of undo or redo, and show it first. */
export async function stepBack(session, desk, kind = "undo") {
  const undo = kind === "undo";
  let step;
  try {
    step = (await api.get("undoable", { session }))[kind];
  } catch (error) {
    failed(error);
    return;
  }
  if (step.problem) {
    notice(step.problem, { hint: step.hint });
    return;
  }
  const back = undo ? "redo" : "undo";
  askFirst({
    title: undo ? "Undo" : "Redo",
    says: [...upcomingWords(session, step, undo), ["To have it back: ", el("code", {}, typed(back, session)), undo && ", as long as nothing else is done."]],
    command: () => typed(kind, session),
    verb: undo ? "Undo" : "Redo",
    send: async () => {
      const done = await api.post(kind, { session, ref: step.ref });
      notice(`${session}: ${done.summary}`);
      desk.done(session);
    },
  });
}

async function undoNow(session, desk, kind = "undo") {
  try {
    const done = await api.post(kind, { session });
    notice(`${session}: ${done.summary}`);
    desk.done(session);
  } catch (error) {
    failed(error);
  }
}

/** A session that was deleted comes back by undo, one whose fork was undone by redo. */
export async function bringBack(session, desk) {
  try {
    const { undo } = await api.get("undoable", { session });
    await undoNow(session, desk, undo.kind === "delete" ? "undo" : "redo");
    go({ session, id: null, other: null });
  } catch (error) {
    failed(error);
  }
}

export function resolveCall(pending, decided, desk) {
  const result = el("textarea", { rows: "4", required: true, placeholder: '{"booking": "4711"}' });
  const says = {
    result: "It was done. The run gets this result, as if the call had returned it.",
    rerun: "The call is made again when the run goes on. If it was done the first time, it is done twice.",
    skip: "The call is left out. The run goes on without a result of it.",
  }[decided];
  const option = { result: () => ["--result", result.value], rerun: () => ["--rerun"], skip: () => ["--skip"] }[decided];
  askFirst({
    title: { result: "It was done", rerun: "Make it again", skip: "Leave it out" }[decided],
    says: [says, "This is final."],
    fields: decided === "result" ? [field("Result, as JSON", result)] : [],
    command: () => commandLine("resolve", "-s", pending.session, ...option(), ...(pending.key.startsWith("-") ? ["--"] : []), pending.key),
    verb: { result: "Give the result", rerun: "Make it again", skip: "Leave it out" }[decided],
    send: async () => {
      const raw = decided === "result" ? { result: checkedJson(result.value) } : {};
      await api.post("resolve", { session: pending.session, key: pending.key, decided }, raw);
      notice(`${pending.name}: decided. The run can be resumed.`);
      desk.done(pending.session);
    },
  });
}

export function answerAsked(pending, desk) {
  const answer = el("textarea", { rows: "3", required: true, placeholder: "true" });
  askFirst({
    title: "Answer",
    says: [`The run of ${pending.session} waits for ${pending.name}. It gets this answer when it goes on.`, "This is final."],
    fields: [field("Answer, as JSON", answer)],
    command: () => typed("answer", pending.session, pending.key, answer.value),
    verb: "Answer",
    send: async () => {
      await api.post("answer", { session: pending.session, name: pending.key }, { answer: checkedJson(answer.value) });
      notice(`${pending.name} is answered. The run can be resumed.`);
      desk.done(pending.session);
    },
  });
}

function checkedJson(text) {
  try {
    JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`This is no JSON: ${error.message}`), { hint: "Text needs quotes: \"done\"" });
  }
  return text;
}

/** Buttons for the actions on a checkpoint. */
export function actionButtons(checkpoint, desk) {
  if (desk.readOnly || checkpoint.damaged) return [];
  const isHead = checkpoint.id === desk.rows?.head;
  return [
    el("button", { type: "button", title: "A new session from here (f)", onclick: () => forkAt(checkpoint, desk) }, "Fork"),
    el("button", { type: "button", title: isHead ? "The head is here" : "The head moves here (r)", disabled: isHead, onclick: () => rewindTo(checkpoint, desk) }, "Rewind"),
    el("button", { type: "button", title: `Tag ${shortId(checkpoint.id)}`, onclick: () => tagIt(checkpoint, desk) }, "Tag"),
    el("button", { type: "button", title: `Label ${shortId(checkpoint.id)}`, onclick: () => labelIt(checkpoint, desk) }, "Label"),
  ];
}
