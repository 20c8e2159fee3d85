// What concerns the scheduler: indicators of harm to online pods, and the reclaimed pods that got this node last.

import { byId, each, line, say, sayName, write } from "/static/dom.js";
import { chosen, duration, integer, NONE, percent } from "/static/format.js";

const milliseconds = (share) => `${integer(share * 1e3)} ms/s`;

/** Name of each indicator of the CustomNodeResource, and the formats of its value and of its limit. */
const INDICATORS = {
  "dioptase.io/runq_latency_p99": ["run-queue latency p99", (s) => duration(s * 1e6), (s) => chosen(s * 1e6)],
  "dioptase.io/reclaimed_interference": ["waiting for reclaimed pods", milliseconds, milliseconds],
  "dioptase.io/cpu_pressure": ["CPU pressure", percent, percent],
  "dioptase.io/memory_pressure": ["memory pressure", percent, percent],
};

function showIndicator(row, { name, value, limit }) {
  const [text, format, formatLimit] = INDICATORS[name] ?? [name, String, String];
  row.dataset.state = value >= limit ? "over" : "below";
  write(row, [text, format(value), formatLimit(limit), percent(value / limit)]);
}

/** Time of an age in seconds: the same steps as cli/formats.age. */
function age(seconds) {
  if (seconds < 99.5) return `${Math.max(Math.round(seconds), 0)} s ago`;
  return seconds < 5970 ? `${Math.round(seconds / 60)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
}

export function showPlacements(view) {
  const { harm, placements, wall_time_ms: now } = view;
  each(byId("harm-rows").tBodies[0], harm, () => line(3), showIndicator);
  byId("harm-rows").hidden = byId("harm-report").hidden = harm.length === 0;
  byId("no-harm").hidden = harm.length > 0;
  each(byId("placement-rows").tBodies[0], placements, () => line(2), (row, { pod, placed_at_ms: at, score }) => {
    sayName(row.cells[0], pod);
    say(row.cells[1], age((now - at) / 1000));
    say(row.cells[2], score === null ? NONE : integer(score));
  });
  byId("placement-rows").hidden = placements.length === 0;
  byId("no-placements").hidden = placements.length > 0;
}
