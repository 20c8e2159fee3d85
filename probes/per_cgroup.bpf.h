/*
 * Parts shared by all probes that count per cgroup: the table that gives each cgroup a slot in the probe's per-CPU array,
 * lost events, the log2 slot of a duration, and task slots.
 *
 * Constants come from the loader as -D macros: TYPED where the verifier knows the types of the arguments (tp_btf, fentry),
 * offsets of kernel fields from BTF, CGROUP_SLOTS, TASK_SLOTS (a power of two) and HIST_SLOTS.
 */
#ifndef DIOPTASE_PER_CGROUP_BPF_H
#define DIOPTASE_PER_CGROUP_BPF_H

#include "kernel.bpf.h"

/* Events that were not counted, by reason; LostEvents in probes/per_cgroup_probe.py has the same order. */
enum { LOST_FULL, LOST_BACKWARDS, LOST_ASLEEP, LOST_TASK_SLOT, LOST_REASONS };
BPF_PERCPU_ARRAY(lost, u64, LOST_REASONS);

static __always_inline int count_lost(u32 reason)
{
	u64 *count = lost.lookup(&reason);

	if (count)
		(*count)++;
	return 0;
}

/*
 * Histogram slot of a duration, the same as slot_of() in api/histogram.py: the bit length of (wait_ns - 1) / 1000.
 * x * 274877907 >> 35 equals x / 125 for every 32-bit x, and a multiplication costs a tenth of a division. A value that
 * exceeds 32 bits after the division by 8 is longer than 34 s and belongs to the last slot.
 */
static __always_inline u32 slot_of(u64 wait_ns)
{
	u64 eighths = (wait_ns ? wait_ns - 1 : 0) >> 3;
	u32 value, slot, shift;

	if (eighths >> 32)
		return HIST_SLOTS - 1;
	value = (eighths * 274877907ULL >> 35) << 1 | 1;
	slot = (value > 0xFFFF) << 4;
	value >>= slot;
	shift = (value > 0xFF) << 3;
	value >>= shift;
	slot |= shift;
	shift = (value > 0xF) << 2;
	value >>= shift;
	slot |= shift;
	shift = (value > 0x3) << 1;
	value >>= shift;
	slot |= shift | value >> 1;
	return slot < HIST_SLOTS ? slot : HIST_SLOTS - 1;
}

/*
 * Slot of each cgroup. A hash map from cgroup to histogram would cost about 50 ns per event; this open-addressed table
 * usually needs one load. A tag is the css serial number (cgroup_subsys_state.serial_nr, never reused) plus one, because
 * serial number 0, that of autogroups, must not look like a free slot.
 * An atomic insert into `cgroups_by_slot` claims a slot; `tags_by_slot` repeats the tags for the fast path.
 */
struct slot_owner {
	u64 tag;
	u64 cgroup_id;
};
BPF_ARRAY(tags_by_slot, u64, CGROUP_SLOTS);
BPF_HASH(cgroups_by_slot, u32, struct slot_owner, CGROUP_SLOTS);
#define WINDOW 16
#define NO_CGROUP_SLOT CGROUP_SLOTS

static __always_inline u32 nth_cgroup_slot(u32 home, u32 nth)
{
	u32 cgroup_slot = home + nth;

	return cgroup_slot < CGROUP_SLOTS ? cgroup_slot : cgroup_slot - CGROUP_SLOTS;
}

static __always_inline u32 claim_cgroup_slot(u64 group, u64 tag, u32 home)
{
	struct slot_owner claim = {.tag = tag, .cgroup_id = cgroup_id_of(group)}, *holder;
	u32 cgroup_slot, nth;
	u64 *slot_tag;

#pragma unroll
	for (nth = 0; nth < WINDOW; nth++) {
		cgroup_slot = nth_cgroup_slot(home, nth);
		if (cgroups_by_slot.insert(&cgroup_slot, &claim) != 0) {
			holder = cgroups_by_slot.lookup(&cgroup_slot);
			if (!holder || holder->tag != tag)
				continue;
		}
		slot_tag = tags_by_slot.lookup(&cgroup_slot);
		if (slot_tag)
			*slot_tag = tag;
		return cgroup_slot;
	}
	return NO_CGROUP_SLOT;
}

static __always_inline u64 tag_of(u64 group)
{
	return FIELD(u64, group, CSS_SERIAL) + 1;
}

/* Slot of a task group (struct task_group *) with this tag; NO_CGROUP_SLOT if its window of the table is full. */
static __always_inline u32 cgroup_slot_for(u64 group, u64 tag)
{
	u64 *slot_tag;
	u32 home = (tag * 0x9E3779B97F4A7C15ULL >> 32) * CGROUP_SLOTS >> 32, cgroup_slot = home, nth;

	slot_tag = tags_by_slot.lookup(&cgroup_slot);
	if (slot_tag && *slot_tag == tag)
		return cgroup_slot;
#pragma unroll
	for (nth = 1; nth < WINDOW; nth++) {
		cgroup_slot = nth_cgroup_slot(home, nth);
		slot_tag = tags_by_slot.lookup(&cgroup_slot);
		if (slot_tag && *slot_tag == tag)
			return cgroup_slot;
	}
	return claim_cgroup_slot(group, tag, home);
}

static __always_inline u32 cgroup_slot_of(u64 group)
{
	return cgroup_slot_for(group, tag_of(group));
}

/*
 * State of a task between two events, indexed by the low bits of its pid: an array lookup is one load, whereas task storage
 * and hash maps need a call. Two live tasks with equal low bits share a slot; `pid` names the task that wrote it last.
 */
struct task_slot {
	u32 pid;
	union {
		u32 runs;
		u32 waker;
	};
	u64 stamp;
};
BPF_ARRAY(task_slots, struct task_slot, TASK_SLOTS);

static __always_inline struct task_slot *task_slot_of(u32 pid)
{
	u32 at = pid & (TASK_SLOTS - 1);

	return task_slots.lookup(&at);
}

#endif
