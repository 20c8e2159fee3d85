/*
 * Hardware counters per cgroup: the reader opens one event per counter and CPU and puts it into a map of events; every switch
 * reads them. The growth since the previous switch belongs to the task that leaves the CPU.
 *
 * The events are pinned: each keeps a hardware counter of its own, so nothing is multiplexed or scaled. An event that lost its
 * counter cannot be read; a run without both readings is not counted, and is reported as unread.
 *
 * A switch costs one read of each counter, because the end of one run is the beginning of the next. Runs of the idle task are
 * not counted.
 */
#include "per_cgroup.bpf.h"

/* Events by CPU number, in the order of struct counts. */
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
BPF_PERCPU_ARRAY(counters, struct counts, CGROUP_SLOTS);

/* Current run: the counters at its beginning, whether they are valid, and how often they could not be read. */
struct run {
	struct counts from;
	u64 valid;
	u64 unread;
};
BPF_PERCPU_ARRAY(runs_on_cpu, struct run, 1);

#define THIS_CPU 0xFFFFFFFFULL /* BPF_F_CURRENT_CPU */
/* bpf_perf_event_read() returns a negative errno instead of a value if the event is missing or has no counter now. */
#define FAILED(value) ((value) >= (u64)-4095)

/* bpf_perf_event_read_value() would also return the enabled time, at the price of reading a clock; a pinned event needs none. */
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
	struct run *run;
	u32 only = 0, cgroup_slot;

	run = runs_on_cpu.lookup(&only);
	if (!run)
		return 0;
	if (!read_counters(&now)) {
		run->valid = 0;
		run->unread++;
		return 0;
	}
	if (run->valid && FIELD(u32, prev, PID)) {
		cgroup_slot = cgroup_slot_of(FIELD(u64, prev, TASK_GROUP));
		row = counters.lookup(&cgroup_slot);
		if (row) {
			row->cycles += now.cycles - run->from.cycles;
			row->instructions += now.instructions - run->from.instructions;
#ifdef MISSES
			row->misses += now.misses - run->from.misses;
#endif
		} else {
			count_lost(LOST_FULL);
		}
	}
	run->from = now;
	run->valid = 1;
	return 0;
}
