/*
 * Counters by pair of cgroups: who did something to whom. Open-addressed, a part of the table for each CPU, so that nothing is
 * shared and nothing is atomic; only for programs that do not come in the middle of each other on a CPU. They run with
 * interrupts off, but for one that sees a task wake itself: an interrupt may wake somebody meanwhile. Since Linux 6.2 the kernel
 * leaves that run of the same program out and counts it as missed; before, such a count may go to the wrong pair.
 * The key is the low half of two tags, that of the one to whom it was done above. Entries are claimed here and given back by
 * the reader, who has the table mapped into memory.
 *
 * Constants come from the loader: PAIRS where a probe wants the table, CPUS, PAIR_BITS, and PAIR_SLOTS where it wants a
 * histogram beside the sum.
 */
#ifndef DIOPTASE_PAIRS_BPF_H
#define DIOPTASE_PAIRS_BPF_H
#ifdef PAIRS

#include "common.bpf.h"

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

/* What found no place there, and is counted elsewhere. */
BPF_PERCPU_ARRAY(crowded, u64, 1);

/* The entry of a pair on this CPU; NULL where its window of the table is full. */
static __always_inline struct pair *pair_of(u64 key)
{
	u32 home = key * 0x9E3779B97F4A7C15ULL >> (64 - PAIR_BITS), mine = bpf_get_smp_processor_id() << PAIR_BITS, at, nth;
	struct pair *pair;
	u64 *count;

#pragma clang loop unroll(disable)
	for (nth = 0; nth < PAIR_WINDOW; nth++) {
		at = mine + ((home + nth) & ((1 << PAIR_BITS) - 1));
		pair = pairs.lookup(&at);
		if (!pair)
			break;
		if (!pair->key)
			pair->key = key;
		if (pair->key == key)
			return pair;
	}
	at = 0;
	count = crowded.lookup(&at);
	if (count)
		(*count)++;
	return NULL;
}

#endif
#endif
