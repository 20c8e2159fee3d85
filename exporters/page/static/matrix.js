// Interference matrix: victims in rows, aggressors in columns, milliseconds of waiting per second in the cells.
//
// Parts without an aggressor are separate columns: own quota, real-time tasks, and unattributed time. A real table: each cell is
// read with its row's and its column's name, and the arrow keys walk from cell to cell.

import { step, legend } from "/static/heat.js";
import { percent } from "/static/format.js";
import { brief, byId, each, el, hint, say, sayName } from "/static/dom.js";

const MOST_VICTIMS = 16;
const MOST_CULPRITS = 10;
const LEAST_CULPRITS = 3;
const HEAD_PX = 176, CELL_PX = 44; // of the names of rows, and of a column
const MAX_NAME = 24;
const BOUNDS = [0.1, 0.3, 1, 3, 10, 30, 100, 300];
const LEAST_MS = 0.05;
const APART = [["throttled_ms", "own throttling"], ["higher_class_ms", "real-time tasks"], ["other_ms", "other"]];
const CAUSES = ["its own quota", "real-time tasks", "other causes"]; // the same in a sentence

/** Milliseconds per second with two significant figures. */
export function rate(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms < LEAST_MS) return ms > 0 ? "< 0.1" : "";
  return ms < 9.95 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en");
}

/** Blame of several cycles, averaged over their time: [{cgroup, total, by: Map, rest, apart: {…}}], the longest waits first. */
export function average(rows) {
  const victims = new Map();
  let seconds = 0;
  for (const row of rows) {
    if (row.intervalS === null) continue;
    seconds += row.intervalS;
    for (const c of row.cgroups.values()) {
      if (!c.blame) continue;
      let victim = victims.get(c.cgroup);
      if (!victim) victims.set(c.cgroup, (victim = { cgroup: c.cgroup, qos: c.qos, by: new Map(), rest: 0, apart: Object.fromEntries(APART.map(([key]) => [key, 0])) }));
      for (const [culprit, ms] of c.blame.culprits) victim.by.set(culprit, (victim.by.get(culprit) ?? 0) + ms * row.intervalS);
      victim.rest += c.blame.rest_ms * row.intervalS;
      for (const [key] of APART) victim.apart[key] += c.blame[key] * row.intervalS;
    }
  }
  for (const victim of victims.values()) {
    for (const [culprit, ms] of victim.by) victim.by.set(culprit, ms / seconds);
    victim.rest /= seconds;
    for (const [key] of APART) victim.apart[key] /= seconds;
    victim.total = [...victim.by.values(), ...Object.values(victim.apart), victim.rest].reduce((a, b) => a + b, 0);
  }
  return [...victims.values()].sort((a, b) => b.total - a.total);
}

export class Matrix {
  #at = [0, 0];

  constructor(section) {
    this.section = section;
    this.top = byId("blame-top");
    this.empty = byId("no-blame");
    this.frame = byId("blame");
    this.table = el("table", { role: "grid" }, el("caption", { class: "hush" }, "Milliseconds of wait per second, by victim and aggressor"), el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "corner" }, "victim ↓ aggressor →"))), el("tbody"));
    this.frame.append(this.table);
    byId("blame-scale").append(legend(BOUNDS, (ms) => `${ms}`));
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    this.frame.addEventListener("focusin", (event) => this.#focused(event.target));
    this.frame.addEventListener("click", (event) => event.target.closest("td, th")?.focus());
  }

  update(rows, fits, names) {
    const all = average(rows);
    const victims = all.filter((victim) => victim.total >= LEAST_MS && fits(victim)).slice(0, MOST_VICTIMS);
    const known = rows.some((row) => [...row.cgroups.values()].some((c) => c.blame));
    this.empty.hidden = victims.length > 0;
    this.frame.hidden = victims.length === 0;
    say(this.empty, known ? "No cgroup waits long enough to be listed." : "Aggressors are not measured, because the probe blame does not run. Sources has the reason and the remedy.");
    say(this.top, victims.length ? verdict(victims, names) : "");
    if (victims.length) this.#draw(victims, names);
  }

  #draw(victims, names) {
    const caused = new Map();
    for (const victim of victims) for (const [culprit, ms] of victim.by) caused.set(culprit, (caused.get(culprit) ?? 0) + ms);
    const ranked = [...caused].filter(([, ms]) => ms >= LEAST_MS).sort((a, b) => b[1] - a[1]).map(([culprit]) => culprit);
    const places = this.#places();
    const culprits = ranked.slice(0, places), dropped = ranked.slice(places);
    const lines = victims.map((victim) => ({
      victim,
      cells: [
        { ms: victim.total },
        ...culprits.map((culprit) => ({ ms: victim.by.get(culprit) ?? 0, self: culprit === victim.cgroup })),
        { ms: victim.rest + dropped.reduce((sum, culprit) => sum + (victim.by.get(culprit) ?? 0), 0) },
        ...APART.map(([key], i) => ({ ms: victim.apart[key], apart: true, first: i === 0 })),
      ],
    }));
    const heads = ["all waits", ...culprits.map(names), "the rest", ...APART.map(([, name]) => name)];
    const apart = heads.length - APART.length;
    const focused = this.frame.contains(document.activeElement) && document.activeElement !== this.frame;
    each(this.table.tHead.rows[0], [null, ...heads], () => el("th", { scope: "col" }, el("span")), (head, name, i) => {
      if (name === null) return; // the corner
      say(head.firstChild, brief(name, MAX_NAME));
      head.title = culprits[i - 2] === undefined ? name : hint(name, culprits[i - 2]);
      head.className = i <= apart ? "" : i === apart + 1 ? "apart first" : "apart";
    });
    each(this.table.tBodies[0], lines, () => el("tr", {}, el("th", { scope: "row" })), (row, { victim, cells }) =>
      each(row, [victim, ...cells], () => el("td"), (cell, item, i) => (i ? showCell(cell, item, i) : showHead(cell, victim.cgroup, names(victim.cgroup)))));
    this.#rove(focused);
  }

  /** Number of aggressors whose columns fit beside the names and the other columns, so that nothing scrolls sideways. */
  #places() {
    const fixed = HEAD_PX + (2 + APART.length) * CELL_PX;
    return Math.min(Math.max(Math.floor((this.frame.clientWidth - fixed) / CELL_PX), LEAST_CULPRITS), MOST_CULPRITS);
  }

  #grid() {
    return [...this.frame.querySelectorAll("tr")].map((row) => [...row.cells]);
  }

  /** Only one cell is in the tab order; the arrow keys move it. */
  #rove(focus) {
    const grid = this.#grid();
    for (const cell of grid.flat()) cell.tabIndex = -1;
    const row = grid[Math.min(this.#at[0], grid.length - 1)];
    const cell = row?.[Math.min(this.#at[1], row.length - 1)];
    if (!cell) return;
    cell.tabIndex = 0;
    if (focus) cell.focus();
  }

  #focused(target) {
    const grid = this.#grid();
    const y = grid.findIndex((row) => row.includes(target));
    if (y < 0) return;
    this.#at = [y, grid[y].indexOf(target)];
    this.#rove(false);
  }

  #key(event) {
    const [y, x] = this.#at;
    const grid = this.#grid();
    const moves = { ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1], Home: [y, 0], End: [y, Infinity] };
    if (!(event.key in moves) || grid.length === 0) return;
    event.preventDefault();
    const [row, column] = moves[event.key];
    this.#at = [Math.min(Math.max(row, 0), grid.length - 1), Math.min(Math.max(column, 0), grid[0].length - 1)];
    this.#rove(true);
  }
}

function showHead(cell, cgroup, name) {
  sayName(cell, name);
  cell.title = hint(name, cgroup);
}

function showCell(cell, { ms, self, apart, first }, i) {
  say(cell, rate(ms));
  cell.title = self ? "its own tasks queue for one another" : "";
  cell.className = [i === 1 ? "total" : `h${step(BOUNDS, ms)}`, self ? "self" : "", apart ? "apart" : "", first ? "first" : ""].filter(Boolean).join(" ");
}

/** The worst pair in a sentence, after any larger cause of its victim; cli/top/blame_matrix.py has the same text. */
function verdict(victims, names) {
  let worst = null;
  for (const victim of victims) {
    for (const [culprit, ms] of victim.by) {
      if (culprit !== victim.cgroup && ms >= LEAST_MS && (worst === null || ms > worst.ms)) worst = { victim, culprit, ms };
    }
  }
  if (worst === null) return "No cgroup waits for another cgroup. The columns on the right have the other causes.";
  const { victim, culprit, ms } = worst;
  const causes = [[victim.by.get(victim.cgroup) ?? 0, "its own tasks"], ...Object.values(victim.apart).map((cause, i) => [cause, CAUSES[i]])];
  const [most, cause] = causes.reduce((a, b) => (b[0] > a[0] ? b : a));
  const share = percent(ms / victim.total);
  if (most <= ms) return `${names(victim.cgroup)} waits most for ${names(culprit)}: ${rate(ms)} ms a second, ${share} of its waits.`;
  return `${names(victim.cgroup)} waits most for ${cause}, ${percent(most / victim.total)} of its waits; among other cgroups most for ${names(culprit)}: ${rate(ms)} ms a second, ${share}.`;
}
