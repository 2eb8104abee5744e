// The page: its parts, put together.

import { api } from "./api.js";
import { forkAt, labelIt, rewindTo, stepBack, tagIt } from "./actions.js";
import { Desk } from "./desk.js";
import { el, put } from "./dom.js";
import { icon } from "./icons.js";
import { listenToKeys, showKeys } from "./keys.js";
import { failed, noticeShelf } from "./notices.js";
import { Sessions } from "./sessions.js";
import { errorNode } from "./shown.js";
import { startTheme, switchTheme } from "./theme.js";
import { followAddress, go, isNarrow, onView, view } from "./view.js";
import { grow, nameStore } from "./words.js";

const SESSIONS_EVERY = 700;
const AGES_EVERY = 10_000;

async function boot() {
  startTheme();
  const root = document.getElementById("app");
  let about;
  try {
    about = await api.get("about");
  } catch (error) {
    put(root, el("div", { class: "empty whole" }, el("h1", {}, "holdfast"), errorNode(error)));
    return;
  }
  nameStore(about.store);
  const sessions = new Sessions(about.statuses, failed, (vacant) => desk.tellVacant(vacant));
  const desk = new Desk({ readOnly: about.read_only, changed: () => sessions.refresh() });
  const link = el("span", { class: "link", role: "img" });
  const panes = el("div", { class: "panes" }, sessions.node, desk.node, desk.detail.node, desk.compare.node);
  desk.detail.node.prepend(el("button", { type: "button", class: "plain back", onclick: () => go({ pane: "timeline" }) }, icon("back"), "Timeline"));
  put(root, topBar(about, link), panes, noticeShelf());

  const arrange = () => (panes.dataset.pane = desk.pane());
  onView((_, before) => {
    sessions.follow(before);
    desk.follow(before);
    arrange();
    document.title = view.session ? `${view.session} – holdfast` : "holdfast";
  });
  followAddress();
  addEventListener("resize", arrange);
  setInterval(grow, AGES_EVERY);
  arrange();
  keyboard(desk, sessions);
  listening(desk, sessions, link);
  desk.open();
  await sessions.refresh();
  sessions.search();
  if (view.session === null && view.id === null && !isNarrow() && sessions.items.length) {
    go({ session: sessions.ordered()[0][0].name }, { replace: true });
  }
}

function topBar(about, link) {
  return el("header", { class: "top" },
    el("a", { class: "brand", href: "#" }, icon("fork"), "holdfast"), el("span", { class: "quiet" }, about.version),
    about.read_only && el("span", { class: "tag" }, "read-only"),
    el("span", { class: "grow" }), link,
    el("button", { type: "button", class: "plain", "aria-label": "Keys", title: "Keys (?)", onclick: showKeys }, "?"),
    el("button", { type: "button", class: "plain", "aria-label": "Light or dark", title: "Light or dark", onclick: switchTheme }, icon("theme")));
}

function keyboard(desk, sessions) {
  const withRow = (act) => () => {
    const row = desk.rows?.byId.get(desk.selected);
    if (row && !row.damaged && !desk.readOnly) act(row, desk);
  };
  const branch = (by) => () => desk.rows && desk.jump(desk.rows.branch(desk.selected, by));
  listenToKeys({
    ArrowUp: () => desk.step(-1), ArrowDown: () => desk.step(1), k: () => desk.step(-1), j: () => desk.step(1),
    Home: () => desk.jump(desk.rows?.list[0]?.id), End: () => desk.jump(desk.rows?.list.at(-1)?.id),
    ArrowLeft: () => desk.detail.turn(-1), ArrowRight: () => desk.detail.turn(1),
    "[": branch(-1), "]": branch(1), h: () => desk.jump(desk.rows?.head),
    f: withRow(forkAt), r: withRow((row) => row.id !== desk.rows.head && rewindTo(row, desk)), t: withRow(tagIt), l: withRow(labelIt),
    u: () => view.session !== null && !desk.readOnly && stepBack(view.session, desk),
    c: () => desk.selected && desk.mark(desk.selected), Escape: () => desk.unmark(),
    "/": () => sessions.input.focus(), "?": showKeys,
  });
}

/** Show each new event. After a gap in the connection, load everything that may be new. */
function listening(desk, sessions, link) {
  let soon = null;
  const later = () => {
    soon ??= setTimeout(() => {
      soon = null;
      sessions.refresh();
    }, SESSIONS_EVERY);
  };
  let wasConnected = false;
  api.listen(
    (event) => {
      desk.heard(event);
      later();
    },
    (connected) => {
      link.className = connected ? "link on" : "link off";
      link.title = connected ? "Live: what lands in the store appears here" : "The server does not answer; trying again";
      link.setAttribute("aria-label", link.title);
      if (connected) {
        if (wasConnected || desk.rows) desk.refresh({ all: wasConnected });
        later(); // a session may have come between the first list and the first event
      }
      wasConnected ||= connected;
    },
  );
}

boot();
