// Tokens, cost and size of the state from the first step on, one below the other over the same steps.

import { api } from "./api.js";
import { el, put, svg } from "./dom.js";
import { bytes, compact, grouped, money } from "./words.js";

const WIDTH = 420;
const TALL = 92;
const TOP = 10;
const EDGES = 4;
const SERIES = [
  ["tokens", "Tokens so far", compact, grouped],
  ["cost", "Cost so far", money, money],
  ["size", "Size of the state", bytes, bytes],
];

/** The tab. A checkpoint on the way to the head is marked on the head's chart; another has its own. */
export async function showUsage(checkpoint, signal, rows) {
  const onWay = rows?.path.has(checkpoint.id);
  const { points } = await api.get("chart", { session: checkpoint.session, id: onWay ? rows.head : checkpoint.id }, signal);
  if (points.length < 2) return el("div", { class: "empty" }, el("p", {}, "One step makes no line yet."), usageTable(points[0]));
  const steps = [points[0].step, points.at(-1).step];
  const across = (step) => EDGES + ((step - steps[0]) / (steps[1] - steps[0] || 1)) * (WIDTH - EDGES * 2);
  const nearest = (step) => points.reduce((best, point) => (Math.abs(point.step - step) < Math.abs(best.step - step) ? point : best));
  const chosen = nearest(checkpoint.step);
  const reading = el("div", { class: "reading", "aria-live": "off" });
  const charts = SERIES.map((series) => drawSeries(series, points, across, checkpoint.step));
  const read = (point, hovered) => {
    put(reading, el("strong", {}, `Step ${grouped(point.step)}`), SERIES.map(([key, , , exact]) => el("span", {}, `${exact(point[key])} `, el("span", { class: "quiet" }, key))));
    for (const { cursor } of charts) {
      cursor.setAttribute("x1", across(point.step));
      cursor.setAttribute("x2", across(point.step));
      cursor.setAttribute("class", hovered ? "cursor" : "cursor away");
    }
  };
  const node = el("div", {
    class: "charts",
    onpointermove: (event) => {
      const box = node.querySelector("svg").getBoundingClientRect();
      read(nearest(steps[0] + ((event.clientX - box.left) / box.width) * (steps[1] - steps[0])), true);
    },
    onpointerleave: () => read(chosen, false),
  }, reading, charts.map((chart) => chart.node), el("div", { class: "axis quiet" }, el("span", {}, `step ${grouped(steps[0])}`), el("span", {}, `step ${grouped(steps[1])}`)));
  read(chosen, false);
  return node;
}

function drawSeries([key, title, word], points, across, step) {
  const most = Math.max(...points.map((point) => point[key]));
  const up = (value) => TALL - (most ? (value / most) * (TALL - TOP) : 0);
  const line = points.map((point) => `${across(point.step).toFixed(1)} ${up(point[key]).toFixed(1)}`).join("L");
  const cursor = svg("line", { y1: 0, y2: TALL, class: "cursor away" });
  const here = across(step);
  const node = el("figure", { class: "series" },
    el("figcaption", {}, title, el("span", { class: "quiet" }, word(most))),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${TALL}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${word(most)} at the end` },
      svg("path", { d: `M${EDGES} ${TALL}L${line}L${WIDTH - EDGES} ${TALL}Z`, class: "area" }),
      svg("path", { d: `M${line}`, class: "curve" }),
      svg("line", { x1: here, x2: here, y1: 0, y2: TALL, class: "here" }),
      cursor));
  return { node, cursor };
}

function usageTable(point) {
  if (!point) return null;
  return el("dl", { class: "facts" }, SERIES.map(([key, title, , exact]) => [el("dt", {}, title), el("dd", {}, exact(point[key]))]));
}
