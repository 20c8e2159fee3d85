// Table of cgroups: managed containers first, then the others with most CPU use, latency, reclaim or memory. Sortable by any column.

import { byId, each, el, line, say, sayName } from "/static/dom.js";
import { bytes, cores, duration, integer, NONE, percent, perSecond } from "/static/format.js";
import { kind } from "/static/heat.js";

/** The label of a cgroup, or its whole path if the label is a part of it. */
const whole = (path, name) => (name.startsWith("…") ? path : name);

const us = (ms) => (typeof ms === "number" ? ms * 1000 : null);
const flow = (x) => (typeof x === "number" ? `${bytes(Math.round(x))}/s` : NONE);
const stall = (ms) => (typeof ms !== "number" ? NONE : ms > 0 ? `${duration(ms * 1000)}/s` : "0");

/** [head, number to sort by, text]; every set begins with the same three columns. */
const column = (head, read, text) => ({ head, read, text: text ?? ((c) => integer(read(c))) });

/** A column that a narrow window leaves out. */
const minor = (of) => ({ ...of, minor: true });
const NAMES = [
  column("Pod or cgroup", (c) => c.pod || c.cgroup, (c, names) => c.pod || whole(c.cgroup, names(c.cgroup))),
  minor(column("Container", (c) => c.container, (c) => c.container)),
  column("QoS level", (c) => c.qos, (c) => c.qos || "not listed"),
];
const of = (head, read, format) => column(head, read, (c) => format(read(c)));
const SETS = {
  cpu: [
    of("CPU cores", (c) => c.cpu_cores, cores),
    of("Throttled", (c) => c.throttled_ratio, percent),
    minor(of("CPU pressure", (c) => c.cpu_pressure_ratio, percent)),
    minor(of("Threads", (c) => c.threads, integer)),
    of("Memory", (c) => c.memory_bytes, bytes),
    minor(of("Waits", (c) => c.wait?.count, integer)),
    minor(column("Wait p50", (c) => c.wait?.p50_us ?? c.wait?.mean_us, (c) => (c.wait && c.wait.p50_us === null && c.wait.mean_us !== null ? `mean ${duration(c.wait.mean_us)}` : duration(c.wait?.p50_us)))),
    of("Wait p99", (c) => c.wait?.p99_us, duration),
    minor(of("Latency p50", (c) => us(c.latency?.p50_ms), duration)),
    of("Latency p99", (c) => us(c.latency?.p99_ms), duration),
    minor(of("Requests/s", (c) => c.latency?.per_second, integer)),
    of("Evaluated p99", (c) => c.evaluated_wait?.p99_us ?? c.evaluated_wait?.mean_us, duration),
  ],
  memory: [
    of("Memory", (c) => c.memory_bytes, bytes),
    of("Limit", (c) => c.memory_limit_bytes, bytes),
    of("Of limit", (c) => (c.memory_limit_bytes ? c.memory_bytes / c.memory_limit_bytes : null), percent),
    of("Memory pressure", (c) => c.memory_pressure_ratio, percent),
    of("Direct reclaim", (c) => c.reclaim?.direct_ms, stall),
    of("Limit reclaim", (c) => c.reclaim?.limit_ms, stall),
    minor(of("Reclaimed pages/s", (c) => c.reclaim?.pages, perSecond)),
    minor(of("Woke kswapd/s", (c) => c.reclaim?.kswapd_wakeups, perSecond)),
    minor(of("Refaults/s", (c) => c.refaults, perSecond)),
    of("OOM kills", (c) => c.oom_kills, integer),
  ],
  io: [
    of("Disk read", (c) => c.traffic?.disk_read, flow),
    of("Disk write", (c) => c.traffic?.disk_write, flow),
    of("Disk p99", (c) => c.traffic?.disk_p99_us, duration),
    minor(of("I/O pressure", (c) => c.io_pressure_ratio, percent)),
    of("Sent", (c) => c.traffic?.sent, flow),
    of("Received", (c) => c.traffic?.received, flow),
    minor(of("Retransmits/s", (c) => c.traffic?.retransmits, perSecond)),
  ],
  threads: [
    of("Threads", (c) => c.threads, integer),
    of("Runnable", (c) => c.threads_by_state?.runnable, integer),
    of("Uninterruptible", (c) => c.threads_by_state?.uninterruptible, integer),
    minor(of("of them I/O", (c) => c.threads_by_state?.iowait, integer)),
    minor(of("Sleeping", (c) => c.threads_by_state?.sleeping, integer)),
    of("Load 1 min", (c) => c.load?.[0], cores),
    minor(of("5 min", (c) => c.load?.[1], cores)),
    minor(of("15 min", (c) => c.load?.[2], cores)),
    of("Tasks waiting", (c) => c.wait_cores, cores),
    of("Throttle p99", (c) => c.throttle_p99_us, duration),
  ],
};

export class Workloads {
  #set = "cpu";
  #sort = { index: -1, down: true };
  #data = [[], null, () => true, (cgroup) => cgroup];

  constructor() {
    this.table = byId("workloads");
    this.empty = byId("no-workloads");
    byId("columns").addEventListener("change", (event) => {
      this.#set = event.target.value;
      this.#sort = { index: -1, down: true };
      this.table.tBodies[0].replaceChildren();
      this.#heads();
      this.#draw();
    });
    this.#heads();
  }

  /** Show all cgroups of a View in its order; `hidden` is the number of others, `fits` the filter, `names(cgroup)` a label. */
  update(cgroups, hidden, fits, names) {
    this.#data = [cgroups, hidden, fits, names];
    this.#draw();
  }

  get #columns() { return [...NAMES, ...SETS[this.#set]]; }

  #heads() {
    const heads = this.#columns.map(({ head, minor: less }, index) => {
      const button = el("button", { type: "button" }, head);
      button.addEventListener("click", () => this.#by(index));
      return el("th", { scope: "col", class: less ? "minor" : null }, button);
    });
    this.table.tHead.replaceChildren(el("tr", {}, ...heads));
    this.#marks();
  }

  /** First click: the largest first (names: from A); second: the other way; third: the order of the View again. */
  #by(index) {
    const names = index < NAMES.length;
    const { index: was, down } = this.#sort;
    if (was !== index) this.#sort = { index, down: !names };
    else if (down !== names) this.#sort = { index, down: names };
    else this.#sort = { index: -1, down: true };
    this.#marks();
    this.#draw();
  }

  #marks() {
    for (const [i, head] of [...this.table.tHead.rows[0].cells].entries()) {
      if (i === this.#sort.index) head.setAttribute("aria-sort", this.#sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  #sorted(cgroups) {
    const { index, down } = this.#sort;
    if (index < 0) return cgroups;
    const { read } = this.#columns[index];
    const way = down ? -1 : 1;
    return [...cgroups].sort((a, b) => {
      const [x, y] = [read(a) ?? null, read(b) ?? null];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values come last in both directions
      return way * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  }

  #draw() {
    const [all, hidden, fits, names] = this.#data;
    const cgroups = this.#sorted(all.filter(fits));
    const body = this.table.tBodies[0];
    const columns = this.#columns;
    this.empty.hidden = cgroups.length > 0;
    const more = hidden > 0 ? `${integer(hidden)} more with lower values, see /metrics` : "";
    say(this.empty, all.length ? `No cgroup matches this filter${more && `; ${more}`}.` : "No cgroup runs, waits, reclaims or holds memory.");
    say(byId("workloads-note"), more ? `since the previous cycle; ${integer(hidden)} more cgroups have lower values` : "since the previous cycle");
    each(body, cgroups, () => line(columns.length - 1), (row, c) => {
      row.className = kind(c.qos);
      sayName(row.cells[0], columns[0].text(c, names));
      for (const [k, { text }] of columns.entries()) if (k > 0) say(row.cells[k], text(c));
      for (const [k, { minor: less }] of columns.entries()) row.cells[k].className = less ? "minor" : "";
      row.cells[0].title = c.pod ? `${c.pod}, cgroup ${c.cgroup}` : c.cgroup;
    });
  }
}
