/*
 * What the CPU's own counters say of each cgroup: one event per counter and CPU, opened by the reader and put into a map of
 * events, is read at every switch. What it has grown by since the switch before belongs to the task that leaves.
 *
 * The events are pinned: each has a hardware counter of its own as long as it counts, so nothing is multiplexed and nothing is
 * scaled. One that has lost its counter cannot be read, and a turn without both ends is not counted but told of.
 *
 * A switch costs one read of each counter, because the end of one turn is the beginning of the next. Turns of the idle task
 * are nobody's.
 */
#include "common.bpf.h"

/* By CPU number. In the order of struct counts. */
BPF_PERF_ARRAY(cycles, CPUS);
BPF_PERF_ARRAY(instructions, CPUS);
#ifdef MISSES
BPF_PERF_ARRAY(misses, CPUS);
#endif

struct counts {
	u64 cycles;
	u64 instructions;
#ifdef MISSES
	u64 misses;
#endif
};
BPF_PERCPU_ARRAY(counters, struct counts, PLACES);

/* The turn that goes on: the counters when it began, if they are `known`, and how often they could not be read. */
struct turn {
	struct counts from;
	u64 known;
	u64 unread;
};
BPF_PERCPU_ARRAY(turns, struct turn, 1);

#define THIS_CPU 0xFFFFFFFFULL /* BPF_F_CURRENT_CPU */
/* Errors come in the place of values: that of an event which is not there, or has no counter now. */
#define FAILED(value) ((value) >= (u64)-4095)

/* bpf_perf_event_read_value would say for how long the event has counted, too: always, as it is pinned, but for a clock's price. */
static __always_inline bool read_counters(struct counts *now)
{
	now->cycles = cycles.perf_read(THIS_CPU);
	now->instructions = instructions.perf_read(THIS_CPU);
#ifdef MISSES
	now->misses = misses.perf_read(THIS_CPU);
	if (FAILED(now->misses))
		return false;
#endif
	return !FAILED(now->cycles) && !FAILED(now->instructions);
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 prev = ctx[1];
	struct counts now = {}, *row;
	struct turn *turn;
	u32 only = 0, place;

	turn = turns.lookup(&only);
	if (!turn)
		return 0;
	if (!read_counters(&now)) {
		turn->known = 0;
		turn->unread++;
		return 0;
	}
	if (turn->known && FIELD(u32, prev, PID)) {
		place = place_of(FIELD(u64, prev, TASK_GROUP));
		row = counters.lookup(&place);
		if (row) {
			row->cycles += now.cycles - turn->from.cycles;
			row->instructions += now.instructions - turn->from.instructions;
#ifdef MISSES
			row->misses += now.misses - turn->from.misses;
#endif
		} else {
			lose(LOST_FULL);
		}
	}
	turn->from = now;
	turn->known = 1;
	return 0;
}
