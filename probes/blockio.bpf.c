/*
 * Block requests per cgroup and device: time from the request's issue to the driver until its completion, and bytes.
 *
 * Owner of a request: where the io controller shares the hierarchy of the cpu controller (version 2), the cgroup that the
 * kernel charges the request's first bio to, writeback included. Otherwise the cgroup of the task that inserted or issued
 * the request: that of the submitter, or the root for requests of kernel threads. Between insertion and completion the
 * request is identified by its address, which the kernel reuses.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments. FIRST, from the loader, is the
 * position of the request among them at insertion and issue.
 */
#include "per_cgroup.bpf.h"

#define REQ_OP_MASK 0xFF
#define REQ_OP_WRITE 1 /* 0 is REQ_OP_READ; operations from 2 on (flush, discard, ...) move no data */

struct owner {
	u64 cgroup_id;
	u64 issued; /* 0 while the request waits for the driver */
};
/* Always look up with a copy of the address: the verifier of Linux 6.1 forgets the type of a pointer passed by reference. */
BPF_HASH(requests, u64, struct owner, REQUESTS);

struct io_key {
	u64 cgroup_id;
	u64 device; /* major << 32 | minor */
};
struct direction {
	u64 sum_ns, bytes;
	u64 slots[HIST_SLOTS];
};
struct counters {
	struct direction directions[2];
};
BPF_HASH(blockio, struct io_key, struct counters, PAIRS);
BPF_ARRAY(zeros, struct counters, 1);

/* Id of the cgroup that the kernel charges, if it is in the hierarchy of `cgroup`, else 0. */
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
 * block_rq_insert(struct request *rq): into the I/O scheduler, by the submitter. A request that the kernel charges to a cgroup
 * is looked at when it is issued. A request that was issued before is inserted again because the driver was busy: the owner
 * stays.
 */
int on_insert(u64 *ctx)
{
	u64 request = ctx[FIRST], key = request, cgroup;
	struct owner owner = {}, *request_owner;

	if (!moves_data(request))
		return 0;
	cgroup = cgroup_now();
	if (charged_to(request, cgroup))
		return 0;
	request_owner = requests.lookup(&key);
	if (request_owner && request_owner->issued) {
		request_owner->issued = 0;
		return 0;
	}
	owner.cgroup_id = id_of(cgroup);
	return requests.update(&key, &owner) ? count_lost(LOST_TASK_SLOT) : 0;
}

/* block_rq_issue(struct request *rq): to the driver, in the context of any task */
int on_issue(u64 *ctx)
{
	u64 request = ctx[FIRST], key = request, cgroup;
	struct owner owner = {}, *request_owner;

	if (!moves_data(request))
		return 0;
	request_owner = requests.lookup(&key);
	if (request_owner && !request_owner->issued) {
		request_owner->issued = bpf_ktime_get_ns();
		return 0;
	}
	cgroup = cgroup_now();
	owner.cgroup_id = charged_to(request, cgroup);
	if (!owner.cgroup_id)
		owner.cgroup_id = id_of(cgroup);
	owner.issued = bpf_ktime_get_ns();
	return requests.update(&key, &owner) ? count_lost(LOST_TASK_SLOT) : 0;
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

static __always_inline struct counters *counters_of(struct io_key *io_key)
{
	struct counters *counters = blockio.lookup(io_key), *empty;
	u32 first = 0;

	if (counters)
		return counters;
	empty = zeros.lookup(&first);
	if (empty)
		blockio.insert(io_key, empty);
	return blockio.lookup(io_key);
}

/*
 * block_rq_complete(struct request *rq, blk_status_t error, unsigned int nr_bytes): completes the rest of the request or a part
 * of it. Completions of one cgroup's requests may run on several CPUs at once.
 */
int on_complete(u64 *ctx)
{
	u64 request = ctx[0], key = request, took;
	u32 bytes = ctx[2], left, write;
	struct owner *owner = requests.lookup(&key);
	struct io_key io_key = {};
	struct counters *counters;
	struct direction *direction;

	if (!owner || !owner->issued)
		return 0;
	took = bpf_ktime_get_ns() - owner->issued;
	io_key.cgroup_id = owner->cgroup_id;
	io_key.device = device_of(request);
	write = FIELD(u32, request, RQ_FLAGS) & 1;
	left = FIELD(u32, request, RQ_BYTES);
	counters = counters_of(&io_key);
	if (bytes >= left)
		requests.delete(&key);
	if (!counters)
		return count_lost(LOST_FULL);
	direction = &counters->directions[write];
	if (!(u8)ctx[1])
		__sync_fetch_and_add(&direction->bytes, bytes);
	if (bytes >= left) {
		__sync_fetch_and_add(&direction->sum_ns, took);
		__sync_fetch_and_add(&direction->slots[slot_of(took)], 1);
	}
	return 0;
}
