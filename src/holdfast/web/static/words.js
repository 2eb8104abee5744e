// Numbers, times and names in a few words.

import { el, put } from "./dom.js";

const GROUPED = new Intl.NumberFormat("en-GB");
const MOMENT = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const AGES = [[60, "s"], [60, "min"], [24, "h"], [60, "d"]];
const SIZES = ["KB", "MB", "GB", "TB"];
const PROGRAM = ["holdfast"];
const STATUS_WORDS = { in_progress: "in progress", completed: "completed", failed: "failed", halted: "halted", died: "its run died", "over budget": "over budget", waiting: "waiting for an answer", "in doubt": "in doubt: nothing says whether a call was done" };

export function grouped(number) {
  return GROUPED.format(number);
}

export function plural(count, one, many) {
  return `${grouped(count)} ${count === 1 ? one : many ?? `${one}s`}`;
}

/** 940, 12.4k, 4.67M */
export function compact(number) {
  if (number < 1000) return String(number);
  const [divisor, unit] = number < 999_500 ? [1e3, "k"] : number < 999_500_000 ? [1e6, "M"] : [1e9, "G"];
  return `${Number((number / divisor).toPrecision(3))}${unit}`;
}

export function money(cost) {
  if (!cost) return "$0";
  if (Math.abs(cost) >= 0.1) return `$${cost.toFixed(2)}`;
  return `$${Number(cost.toPrecision(2))}`; // fractions of a cent are what single steps cost
}

/** Tokens and cost, or a dash for nothing. */
export function spent(usage) {
  if (!usage.tokens && !usage.cost) return "–";
  return `${compact(usage.tokens)} tok · ${money(usage.cost)}`;
}

export function bytes(count) {
  if (count < 1000) return `${count} B`;
  let number = count, unit = "B";
  for (const larger of SIZES) {
    if (number < 1000) break;
    [number, unit] = [number / 1000, larger];
  }
  return `${Number(number.toPrecision(3))} ${unit}`;
}

export function moment(time) {
  return MOMENT.format(new Date(time));
}

/** How long ago, in one number; a date if that is long. */
export function age(time, now = Date.now()) {
  const seconds = (now - Date.parse(time)) / 1000;
  if (seconds < -5) return moment(time);
  let left = Math.max(Math.floor(seconds), 0);
  if (left < 5) return "now";
  for (const [size, unit] of AGES) {
    if (left < size) return `${left} ${unit} ago`;
    left = Math.floor(left / size);
  }
  return time.slice(0, 10);
}

/** An age that is updated while it is shown. */
export function ageNode(time) {
  return el("time", { datetime: time, title: moment(time), class: "age" }, age(time));
}

/** Let all ages in the page go on. */
export function grow() {
  for (const node of document.querySelectorAll("time.age")) put(node, age(node.dateTime));
}

/** Seconds in one number: 0.4 ms, 310 ms, 4.2 s, 3 min. */
export function lasting(seconds) {
  if (seconds < 0.0005) return "<1 ms";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(seconds < 0.01 ? 1 : 3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** The beginning of an id, which commands take as well. It is the time, and a few random bits. */
export function shortId(id) {
  return id.slice(0, 12);
}

export function statusWord(status) {
  return Object.hasOwn(STATUS_WORDS, status) ? STATUS_WORDS[status] : status;
}

/** The title of a checkpoint: its label, or what it changed, or its trigger. */
export function titleOf(checkpoint) {
  if (checkpoint.damaged) return "damaged";
  return checkpoint.label ?? checkpoint.summary ?? checkpoint.trigger ?? checkpoint.operation;
}

/** From now on, commands are for this store. */
export function nameStore(address) {
  if (address) PROGRAM.push("--store", address);
}

/** A command as one would type it. */
export function commandLine(...words) {
  return [...PROGRAM, ...words].map(shellWord).join(" ");
}

function shellWord(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
