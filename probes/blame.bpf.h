/*
 * Who had the CPU while a task waited for it: what runqlat.bpf.c does in addition where the loader says BLAME.
 *
 * Each CPU keeps the latest SPANS moments (a power of two) at which it changed hands: since when which cgroup ran there, or a
 * higher scheduling class, or nobody. Consecutive tasks of one cgroup are one span, and a span ends where the next begins, so
 * a switch within a cgroup writes nothing. Spans that are older than these are not lost: those shorter than 1 ms are added
 * up in stretches of up to 8 ms, by who ran, so that neighbours that swap the CPU 100,000 times a second do not hide behind
 * each other, and longer ones are stretches by themselves.
 *
 * When a task comes in that has waited, spans and then stretches are walked back over its wait, and every overlap is added to
 * the pair of the waiting and the running cgroup. All of it is on the run queue's own clock, on which the wait was measured:
 * the parts of a wait add up to the wait, to the nanosecond. Only a stretch of several spans in which a wait began is split by
 * proportion, because their order is forgotten. A task that is moved to another CPU while it waits has the part until then
 * split there and then, by what the CPU that it leaves remembers.
 *
 * Own quota: cfs_rq.throttled_clock_self says since when the group, or one above it, is throttled on this CPU, and
 * throttled_clock_self_time for how long it was in all (677ea015f231, Linux 6.6). The first is noted when a task of the group
 * leaves the CPU; by how much the second has grown when one comes back tells when the throttle ended. What lies between is no
 * neighbour's doing. Only the latest throttle is known. Since Linux 6.18 (BY_TASK) a wait has one at most, because each task is
 * throttled by itself, on its way to user space: one that comes in while its group is throttled was not, and has waited for
 * whoever ran. Where a group was throttled without leaving the CPU (before 6.18, when a
 * sibling used up their parent's quota) the length is right, and the throttle is taken to have ended with the wait; the first
 * one of a group on a CPU stays with whoever ran, because its length is not known. Before Linux 6.6 there is throttle_count
 * alone: a throttle is then taken to end when the group's first task is back.
 */
#ifndef DIOPTASE_BLAME_BPF_H
#define DIOPTASE_BLAME_BPF_H

#include "pairs.bpf.h"

/* A wait on one CPU, of a task whose group has this tag and place. */
struct waited {
	u64 tag, cfs_rq, begin, end;
	u32 place;
	u32 known; /* whether it is counted */
};

#ifdef BLAME

#define NOBODY 0ULL
#define HIGHER_CLASS 0xFFFFFFFFULL
#define STRETCH_NS (1ULL << 23)
#define LONG_NS (1ULL << 20)
#define MAX_RT_PRIO 100 /* below it are real-time, deadline and stop tasks, and those that inherit from them */

struct span {
	u64 since;
	u64 who;
};
/* Older spans by who ran, at most SHARES of them; it ends where the next one begins, the latest one at the oldest span. */
#define SHARES 4
struct stretch {
	u64 since;
	struct {
		u64 who;
		u64 ns;
	} shares[SHARES];
};
struct timeline {
	u64 head;
	u64 latest;
	u64 open; /* whether more may be added to the latest stretch */
	u64 place;
	u64 waits, waited_ns; /* waits that ended here, and time waited here by them and by those that were moved away */
	struct span spans[SPANS];
	struct stretch stretches[STRETCHES];
};
/* Not a per-CPU array, because whoever pulls a waiting task over to another CPU looks into the one that it waited on. */
BPF_ARRAY(timelines, struct timeline, CPUS);

/* Parts of waits that are no cgroup's. */
struct parts {
	u64 throttled_ns, higher_class_ns, other_ns;
};

/*
 * The latest throttle of a group on this CPU. `left`: since when one lasts that has not been seen to end; 0: none. `seen` is how
 * long it was throttled in all, as of the last look, and `tag` whose look that was.
 */
struct hold {
	u64 tag, left, seen, from, until;
};
BPF_PERCPU_ARRAY(holds, struct hold, PLACES);

/* Up to where a task's run_delay has been split, by the low bits of its pid like a seat: what it waited before it was moved. */
BPF_ARRAY(splits, u64, SEATS);

static __always_inline struct timeline *this_timeline(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return timelines.lookup(&cpu);
}

static __always_inline u64 clock_of(u64 cfs_rq)
{
	u64 rq = FIELD(u64, cfs_rq, RQ);

	return FIELD(u64, rq, RQ_CLOCK);
}

/* Since when the group is throttled on this CPU; 0 if it is not. */
static __always_inline u64 throttled_since(u64 cfs_rq)
{
#ifdef THROTTLED_SINCE
	return FIELD(u64, cfs_rq, THROTTLED_SINCE);
#elif defined THROTTLE_COUNT
	return FIELD(u32, cfs_rq, THROTTLE_COUNT) ? clock_of(cfs_rq) : 0;
#else
	return 0;
#endif
}

/* How long the group was throttled on this CPU in all, but for a throttle that lasts. */
static __always_inline u64 throttled_ns(u64 cfs_rq)
{
#ifdef THROTTLED_NS
	return FIELD(u64, cfs_rq, THROTTLED_NS);
#else
	return 0;
#endif
}

/*
 * What the group was throttled before it is seen here for the first time is its past, and no part of any wait. Without a branch,
 * because the verifier would walk everything behind it twice: `known` is all ones where it was seen before, or nothing.
 */
static __always_inline void meet(struct hold *hold, u64 tag, u64 total)
{
#ifdef THROTTLED_NS
	u64 differs = hold->tag ^ tag, known;

	asm volatile("" : "+r"(differs));
	known = ~(u64)((s64)(differs | -differs) >> 63);
	asm volatile("" : "+r"(known));
	hold->tag = tag;
	hold->left &= known;
	hold->from &= known;
	hold->until &= known;
	hold->seen = (hold->seen & known) | (total & ~known);
#endif
}

/* A task leaves this CPU, maybe because its group is throttled. */
static __always_inline void leave(u64 task)
{
	u64 cfs_rq = FIELD(u64, task, CFS_RQ), since = throttled_since(cfs_rq);
	struct timeline *line = this_timeline();
	struct hold *hold;
	u32 place;

	if (!since || !line)
		return;
	place = line->place;
	hold = holds.lookup(&place);
	if (!hold)
		return;
	meet(hold, tag_of(FIELD(u64, task, TASK_GROUP)), throttled_ns(cfs_rq));
	hold->left = since;
}

/* Add what is about to be forgotten as a span to the latest stretch, or begin a new one with it. */
static __always_inline void condense(struct timeline *line, struct span *span, u64 until)
{
	struct stretch *into = &line->stretches[line->latest & (STRETCHES - 1)];
	u64 ns = until - span->since;
	u32 nth;

	if (!span->since || !ns)
		return;
	if (line->open && ns < LONG_NS && span->since - into->since < STRETCH_NS) {
#pragma unroll
		for (nth = 0; nth < SHARES; nth++) {
			if (into->shares[nth].ns && into->shares[nth].who != span->who)
				continue;
			into->shares[nth].who = span->who;
			into->shares[nth].ns += ns;
			return;
		}
	}
	line->open = ns < LONG_NS;
	line->latest++;
	into = &line->stretches[line->latest & (STRETCHES - 1)];
	__builtin_memset(into, 0, sizeof(*into));
	into->since = span->since;
	into->shares[0].who = span->who;
	into->shares[0].ns = ns;
}

static __always_inline struct timeline *take_over(u64 now, u64 who, u32 place)
{
	struct timeline *line = this_timeline();
	struct span *span;

	if (!line)
		return NULL;
	line->place = place;
	if (line->spans[line->head & (SPANS - 1)].who == who)
		return line;
	line->head++;
	span = &line->spans[line->head & (SPANS - 1)];
	condense(line, span, line->spans[(line->head + 1) & (SPANS - 1)].since);
	span->since = now;
	span->who = who;
	return line;
}

static __always_inline void idle_comes_in(u64 idle)
{
	take_over(clock_of(FIELD(u64, idle, CFS_RQ)), NOBODY, NO_PLACE);
}

static __always_inline void task_comes_in(u64 task, struct waited *wait)
{
	s32 prio = FIELD(s32, task, PRIO);
	struct timeline *line = take_over(wait->end, prio < MAX_RT_PRIO ? HIGHER_CLASS : (u32)wait->tag, wait->place);

	if (!line || !wait->known)
		return;
	line->waits++;
	line->waited_ns += wait->end - wait->begin;
}

/* The throttle that this wait may lie in, as `from` and `until`. */
static __always_inline struct hold throttle_of(struct waited *wait)
{
	u64 since = throttled_since(wait->cfs_rq), total = throttled_ns(wait->cfs_rq);
	struct hold none = {}, *hold;
	u32 place = wait->place;

#ifdef THROTTLED_NS
	if (!since && !total)
		return none;
#endif
#ifndef BY_TASK
	if (since) { /* It is throttled still, and comes in to finish what it does in the kernel. */
		none.from = since;
		none.until = wait->end;
		return none;
	}
#endif
	hold = holds.lookup(&place);
	if (!hold)
		return none;
	meet(hold, wait->tag, total);
#ifdef THROTTLED_NS
	if (total != hold->seen) {
		hold->from = hold->left ? hold->left : wait->end - (total - hold->seen);
		hold->until = hold->from + (total - hold->seen);
		hold->seen = total;
		hold->left = 0;
	}
#else
	if (hold->left) {
		hold->from = hold->left;
		hold->until = wait->end;
		hold->left = 0;
	}
#endif
	return *hold;
}

/* How much of a stretch of time lies within the throttle. */
static __always_inline u64 throttled_within(struct hold *hold, u64 from, u64 until)
{
	if (from < hold->from)
		from = hold->from;
	if (until > hold->until)
		until = hold->until;
	return until > from ? until - from : 0;
}

static __always_inline void add_pair(struct parts *parts, u64 key, u64 ns)
{
	struct pair *pair = pair_of(key);

	if (pair)
		pair->ns += ns;
	else
		parts->other_ns += ns;
}

static __always_inline void give(struct parts *parts, struct waited *wait, u64 who, u64 ns)
{
	if (who == NOBODY)
		parts->other_ns += ns;
	else if (who == HIGHER_CLASS)
		parts->higher_class_ns += ns;
	else if (ns)
		add_pair(parts, wait->tag << 32 | who, ns);
}

/* The part of a wait before `end`, by stretches. What is older than the oldest stretch is other_ns. */
static __always_inline void split_older(struct parts *parts, struct waited *wait, struct timeline *line, struct hold *hold, u64 end)
{
	u64 latest = line->latest, from, left, whole, ratio, ns;
	struct stretch *stretch;
	u32 back, nth;

#pragma clang loop unroll(disable)
	for (back = 0; back < STRETCHES && end != wait->begin; back++) {
		stretch = &line->stretches[(latest - back) & (STRETCHES - 1)];
		if (!stretch->since || stretch->since >= end)
			break;
		from = stretch->since > wait->begin ? stretch->since : wait->begin;
		whole = end - stretch->since;
		left = end - from - throttled_within(hold, from, end);
		ratio = (left << 16) / whole;
#pragma clang loop unroll(disable)
		for (nth = 0; nth < SHARES; nth++) {
			ns = stretch->shares[nth].ns * ratio >> 16;
			give(parts, wait, stretch->shares[nth].who, ns);
			left -= ns;
		}
		parts->other_ns += left;
		end = from;
	}
	parts->other_ns += end - wait->begin - throttled_within(hold, wait->begin, end);
}

/* Split a wait among those who had the CPU of that timeline meanwhile, as far back as there are spans; returns how far. */
static __always_inline u64 split(struct parts *parts, struct waited *wait, struct timeline *line, struct hold *hold)
{
	u64 head = line->head, from, end = wait->end;
	struct span *span;
	u32 back;

#pragma clang loop unroll(disable)
	for (back = 0; back < SPANS && end != wait->begin; back++) {
		span = &line->spans[(head - back) & (SPANS - 1)];
		from = span->since > wait->begin ? span->since : wait->begin;
		give(parts, wait, span->who, end - from - throttled_within(hold, from, end));
		end = from;
	}
	return end;
}

static __always_inline void split_here(struct parts *parts, struct waited *wait)
{
	struct timeline *line = this_timeline();
	struct hold hold = throttle_of(wait);
	u64 left;

	if (!line) {
		parts->other_ns += wait->end - wait->begin;
		return;
	}
	parts->throttled_ns += throttled_within(&hold, wait->begin, wait->end);
	left = split(parts, wait, line, &hold);
	if (left != wait->begin)
		split_older(parts, wait, line, &hold, left);
}

/* How much of a task's run_delay beyond `mark` has been split. */
static __always_inline u64 split_before(u32 pid, u64 mark, u64 delay)
{
	u32 at = pid & (SEATS - 1);
	u64 *until = splits.lookup(&at);

	return until && *until > mark && *until <= delay ? *until - mark : 0;
}

/*
 * A task is moved away that has waited: `delay` is its run_delay, which was `mark` when it began to wait. Without stretches,
 * because the verifier would take as long again for a second walk over them, and few waits that end like this are so old.
 */
static __always_inline void split_there(struct parts *parts, struct waited *wait, u32 pid, u64 mark, u64 delay)
{
	u64 rq = FIELD(u64, wait->cfs_rq, RQ);
	u32 cpu = FIELD(u32, rq, RQ_CPU), at = pid & (SEATS - 1);
	struct timeline *line = timelines.lookup(&cpu);
	u64 *until = splits.lookup(&at);
	struct hold none = {};

	if (!line || !until)
		return;
	wait->end = FIELD(u64, rq, RQ_CLOCK);
	wait->begin = wait->end - (delay - mark - split_before(pid, mark, delay));
	*until = delay;
	line->waited_ns += wait->end - wait->begin;
	parts->other_ns += split(parts, wait, line, &none) - wait->begin;
}

#else

static __always_inline void leave(u64 task)
{
}

static __always_inline void idle_comes_in(u64 idle)
{
}

static __always_inline void task_comes_in(u64 task, struct waited *wait)
{
}

#endif
#endif
