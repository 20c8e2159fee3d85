/*
 * What every probe per cgroup shares beyond kernel.bpf.h: the log2 slot of a wait, and the table that gives each
 * cgroup a place in the probe's per-CPU array.
 *
 * Constants come from the loader as -D macros: TYPED where the verifier knows the types of the arguments (tp_btf, fentry),
 * offsets of kernel fields from BTF, PLACES, SEATS (a power of two) and SLOTS.
 */
#ifndef DIOPTASE_COMMON_BPF_H
#define DIOPTASE_COMMON_BPF_H

#include "kernel.bpf.h"

/* Events that were not counted, by reason; probes/cgroup_table.py reads them in this order. */
enum { LOST_FULL, LOST_BACKWARDS, LOST_ASLEEP, LOST_SEAT, LOST_REASONS };
BPF_PERCPU_ARRAY(lost, u64, LOST_REASONS);

static __always_inline int lose(u32 reason)
{
	u64 *count = lost.lookup(&reason);

	if (count)
		(*count)++;
	return 0;
}

/*
 * The slot of a wait, as slot_of() in api/histogram.py: the bit length of (wait_ns - 1) / 1000.
 * x * 274877907 >> 35 is x / 125 for every 32-bit x: a multiplication costs a tenth of what a division does. What does
 * not fit after the division by 8 is beyond 34 s and belongs into the last slot anyway.
 */
static __always_inline u32 slot_of(u64 wait_ns)
{
	u64 eighths = (wait_ns ? wait_ns - 1 : 0) >> 3;
	u32 value, slot, shift;

	if (eighths >> 32)
		return SLOTS - 1;
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
	return slot < SLOTS ? slot : SLOTS - 1;
}

/*
 * Which cgroup has which place. A hash map from cgroup to histogram would cost about 50 ns an event; this is an
 * open-addressed table whose usual lookup is one load. A tag is a css serial number plus one: serial numbers are never
 * used twice, and 0 (the autogroups' one) must not look like a free place.
 * `groups` says who has a place: inserting into it is the claim, and atomic. `owners` repeats the tags for the fast path.
 */
struct group {
	u64 tag;
	u64 cgroup_id;
};
BPF_ARRAY(owners, u64, PLACES);
BPF_HASH(groups, u32, struct group, PLACES);
#define WINDOW 16
#define NO_PLACE PLACES

static __always_inline u32 nth_place(u32 home, u32 nth)
{
	u32 place = home + nth;

	return place < PLACES ? place : place - PLACES;
}

static __always_inline u32 claim_place(u64 group, u64 tag, u32 home)
{
	struct group claim = {.tag = tag, .cgroup_id = cgroup_id_of(group)}, *taken;
	u32 place, nth;
	u64 *owner;

#pragma unroll
	for (nth = 0; nth < WINDOW; nth++) {
		place = nth_place(home, nth);
		if (groups.insert(&place, &claim) != 0) {
			taken = groups.lookup(&place);
			if (!taken || taken->tag != tag)
				continue;
		}
		owner = owners.lookup(&place);
		if (owner)
			*owner = tag;
		return place;
	}
	return NO_PLACE;
}

static __always_inline u64 tag_of(u64 group)
{
	return FIELD(u64, group, CSS_SERIAL) + 1;
}

/* The place of a task group (struct task_group *) of that tag, or NO_PLACE where its window of the table is full. */
static __always_inline u32 place_for(u64 group, u64 tag)
{
	u64 *owner;
	u32 home = (tag * 0x9E3779B97F4A7C15ULL >> 32) * PLACES >> 32, place = home, nth;

	owner = owners.lookup(&place);
	if (owner && *owner == tag)
		return place;
#pragma unroll
	for (nth = 1; nth < WINDOW; nth++) {
		place = nth_place(home, nth);
		owner = owners.lookup(&place);
		if (owner && *owner == tag)
			return place;
	}
	return claim_place(group, tag, home);
}

static __always_inline u32 place_of(u64 group)
{
	return place_for(group, tag_of(group));
}

/*
 * What is remembered of a task between two events: an array by the low bits of its pid, because a lookup there is one load,
 * where task storage or a hash map is a call. Two live tasks with the same low bits share a seat; `pid` tells whose it is.
 */
struct seat {
	u32 pid;
	union {
		u32 runs;
		u32 who;
	};
	u64 mark;
};
BPF_ARRAY(seats, struct seat, SEATS);

static __always_inline struct seat *seat_of(u32 pid)
{
	u32 at = pid & (SEATS - 1);

	return seats.lookup(&at);
}

#endif
