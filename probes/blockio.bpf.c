/*
 * Block requests per cgroup and device: time from the request's issue to the driver until its completion, and bytes.
 *
 * Whose request it is: where the io controller shares the hierarchy of the cpu controller (version 2), the cgroup that the
 * kernel charges the request's first bio to, writeback included. Otherwise the cgroup of the task that inserted or issued
 * the request: the submitter's own, or the root's for what kernel threads submit. Between insertion and completion the
 * request is remembered by its address, which the kernel uses again and again.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments. FIRST, from the loader, is where
 * the request stands among them on the way to the driver.
 */
#include "common.bpf.h"

#define REQ_OP_MASK 0xFF
#define REQ_OP_WRITE 1 /* 0 is REQ_OP_READ; from 2 on requests move no data of anybody's */

struct owner {
	u64 cgroup_id;
	u64 issued; /* 0 while it waits for the driver */
};
/* Its key is always a copy of the address: Linux 6.1 forgets the type of a pointer that was passed by reference. */
BPF_HASH(requests, u64, struct owner, REQUESTS);

struct where {
	u64 cgroup_id;
	u64 device; /* major << 32 | minor */
};
struct direction {
	u64 sum_ns, bytes;
	u64 slots[SLOTS];
};
struct counters {
	struct direction ways[2];
};
BPF_HASH(blockio, struct where, struct counters, PAIRS);
BPF_ARRAY(zeros, struct counters, 1);

/* Number of the cgroup that the kernel charges, if it is in the hierarchy of this one, else 0. */
static __always_inline u64 charged_to(u64 request, u64 cgroup)
{
#ifdef BIO_BLKG
	u64 bio = FIELD(u64, request, RQ_BIO), blkg, blkcg, charged;

	if (bio && cgroup) {
		blkg = FIELD(u64, bio, BIO_BLKG);
		blkcg = FIELD(u64, blkg, BLKG_BLKCG);
		charged = FIELD(u64, blkcg, BLKCG_CGROUP);
		if (charged && FIELD(u64, charged, CGROUP_ROOT) == FIELD(u64, cgroup, CGROUP_ROOT))
			return id_of(charged);
	}
#endif
	return 0;
}

static __always_inline u64 cgroup_now(void)
{
	u64 group = FIELD(u64, CURRENT(), TASK_GROUP);

	return FIELD(u64, group, CSS_CGROUP);
}

static __always_inline bool moves_data(u64 request)
{
	return (FIELD(u32, request, RQ_FLAGS) & REQ_OP_MASK) <= REQ_OP_WRITE;
}

/*
 * block_rq_insert(struct request *rq): into the scheduler, by the submitter; what the kernel charges can wait until issue.
 * A request that was issued is here again because the driver was busy: the owner stays.
 */
int on_insert(u64 *ctx)
{
	u64 request = ctx[FIRST], key = request, cgroup;
	struct owner owner = {}, *known;

	if (!moves_data(request))
		return 0;
	cgroup = cgroup_now();
	if (charged_to(request, cgroup))
		return 0;
	known = requests.lookup(&key);
	if (known && known->issued) {
		known->issued = 0;
		return 0;
	}
	owner.cgroup_id = id_of(cgroup);
	return requests.update(&key, &owner) ? lose(LOST_SEAT) : 0;
}

/* block_rq_issue(struct request *rq): to the driver, by whoever runs */
int on_issue(u64 *ctx)
{
	u64 request = ctx[FIRST], key = request, cgroup;
	struct owner owner = {}, *known;

	if (!moves_data(request))
		return 0;
	known = requests.lookup(&key);
	if (known && !known->issued) {
		known->issued = bpf_ktime_get_ns();
		return 0;
	}
	cgroup = cgroup_now();
	owner.cgroup_id = charged_to(request, cgroup);
	if (!owner.cgroup_id)
		owner.cgroup_id = id_of(cgroup);
	owner.issued = bpf_ktime_get_ns();
	return requests.update(&key, &owner) ? lose(LOST_SEAT) : 0;
}

static __always_inline u64 device_of(u64 request)
{
#ifdef RQ_DISK
	u64 disk = FIELD(u64, request, RQ_DISK);
#else
	u64 queue = FIELD(u64, request, RQ_QUEUE), disk = FIELD(u64, queue, QUEUE_DISK);
#endif
	u64 major = FIELD(u32, disk, DISK_MAJOR), minor = FIELD(u32, disk, DISK_MINOR);

	return major << 32 | minor;
}

static __always_inline struct counters *counters_of(struct where *where)
{
	struct counters *counters = blockio.lookup(where), *empty;
	u32 first = 0;

	if (counters)
		return counters;
	empty = zeros.lookup(&first);
	if (empty)
		blockio.insert(where, empty);
	return blockio.lookup(where);
}

/*
 * block_rq_complete(struct request *rq, blk_status_t error, unsigned int nr_bytes): of all that is left of it, or a part.
 * Completions of one cgroup's requests may run on several CPUs at once.
 */
int on_complete(u64 *ctx)
{
	u64 request = ctx[0], key = request, took;
	u32 bytes = ctx[2], left, way;
	struct owner *owner = requests.lookup(&key);
	struct where where = {};
	struct counters *counters;
	struct direction *direction;

	if (!owner || !owner->issued)
		return 0;
	took = bpf_ktime_get_ns() - owner->issued;
	where.cgroup_id = owner->cgroup_id;
	where.device = device_of(request);
	way = FIELD(u32, request, RQ_FLAGS) & 1;
	left = FIELD(u32, request, RQ_BYTES);
	counters = counters_of(&where);
	if (bytes >= left)
		requests.delete(&key);
	if (!counters)
		return lose(LOST_FULL);
	direction = &counters->ways[way];
	if (!(u8)ctx[1])
		__sync_fetch_and_add(&direction->bytes, bytes);
	if (bytes >= left) {
		__sync_fetch_and_add(&direction->sum_ns, took);
		__sync_fetch_and_add(&direction->slots[slot_of(took)], 1);
	}
	return 0;
}
