/*
 * Counters by pair of cgroups (victim, aggressor). The table is open-addressed and has one part per CPU, so updates need no
 * atomic operation, provided that the programs using it do not interrupt each other on a CPU. They run with interrupts off,
 * except one case of sched_waking, a task that wakes itself: an interrupt may wake another task meanwhile. Since Linux 6.2
 * the kernel skips such a nested run of the same program and counts it as missed; before, the count may go to another pair.
 * The key holds the low halves of two tags, that of the victim in the upper 32 bits. Entries are claimed here and freed by
 * the reader, which maps the table into its memory.
 *
 * Constants come from the loader: PAIRS if the probe uses the table, CPUS, PAIR_BITS, and PAIR_SLOTS for a histogram in
 * addition to the sum.
 */
#ifndef DIOPTASE_CGROUP_PAIRS_BPF_H
#define DIOPTASE_CGROUP_PAIRS_BPF_H
#ifdef PAIRS

#include "per_cgroup.bpf.h"

#define PAIR_WINDOW 8
#define BPF_F_MMAPABLE (1 << 10)

struct pair {
	u64 key;
	u64 ns;
#ifdef PAIR_SLOTS
	u64 slots[PAIR_SLOTS];
#endif
};
BPF_F_TABLE("array", u32, struct pair, pairs, CPUS << PAIR_BITS, BPF_F_MMAPABLE);

/* Number of values that found no entry; the caller counts them elsewhere. */
BPF_PERCPU_ARRAY(pairs_overflow, u64, 1);

/* Entry of a pair on this CPU; NULL if its window of the table is full. */
static __always_inline struct pair *pair_of(u64 key)
{
	u32 home = key * 0x9E3779B97F4A7C15ULL >> (64 - PAIR_BITS), cpu_base = bpf_get_smp_processor_id() << PAIR_BITS, at, nth;
	struct pair *pair;
	u64 *count;

#pragma clang loop unroll(disable)
	for (nth = 0; nth < PAIR_WINDOW; nth++) {
		at = cpu_base + ((home + nth) & ((1 << PAIR_BITS) - 1));
		pair = pairs.lookup(&at);
		if (!pair)
			break;
		if (!pair->key)
			pair->key = key;
		if (pair->key == key)
			return pair;
	}
	at = 0;
	count = pairs_overflow.lookup(&at);
	if (count)
		(*count)++;
	return NULL;
}

#endif
#endif
