// y[M, N] = x[M, K] . (w[N, K] * scale)^T for few tokens, w in FP8 E4M3: yT = w . x'T by wgmma, A (weights) from registers.
//
// Compile with -D: TOK (tokens of a tile: 8, 16, 32, 64), WG (consumer warpgroups), HR (rows of a half), GATED (two
// halves: gate and up), TM (tiles of 64 rows for a warpgroup: 2 if GATED or for plain tiles of WG*128 rows),
// CN (CTAs along N that share x' by multicast), CK (CTAs along K whose sums are added through distributed shared
// memory), WST, XST (stages of weights, of x'), MODE (0 per channel, 1 blocks of 128x128), MINB (CTAs an SM),
// EARLY (0: dependents never early, 1: after the last request for weights, 2: at the start).
// Second version of few.cu, NOT RUN YET: places of x' are constants (no R2UR between products), GP parts of K whose
// sums go through global memory (then CK is 1), factors are asked for before the loop.
// No includes: the same source for NVRTC and nvcc.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) TMap { char bytes[128]; };

#ifndef DIAG
#define DIAG 0  // wrong results, for timing: 1 without x', 2 without adding up, 4 without weights
#endif
#define STEP 128
#define HALVES (GATED ? 2 : 1)
#define ROWS (HR * HALVES)
#define CONSUMERS (WG * 128)
#define THREADS (CONSUMERS + 64)
#define W_BYTES (ROWS * STEP)
#define X_BYTES (TOK * STEP * 2)
#define RS (ROWS + 4)              // floats of a token's row of sums
#ifndef GP
#define GP 1
#endif
#define PARTS (CK * GP)
#define BASE 0x400  // of dynamic shared memory; checked
#define TD (TOK / PARTS)              // tokens that a CTA of a cluster finishes
#define RECV_BYTES ((CK - 1) * TD * RS * 4)
#define CLUSTER (CN * CK)
#define NACC (TOK / 2)
// Sets of sums: two of even and odd halves of a step, or, with TM of 1, SETS may be 1.
#ifndef SETS
#define SETS 2
#endif
#define SET(tm, j) (TM == 2 ? (tm) : SETS == 2 ? (j) : 0)
#define BUF(tm, j) (TM == 2 ? (tm) : (j))
// Shared memory: [weights ring | x' ring | received sums | scales | factors | barriers]
#define OFF_X (WST * W_BYTES)
#define OFF_RECV (OFF_X + XST * X_BYTES)
#define OFF_SCALE (OFF_RECV + RECV_BYTES)
#define OFF_FACTOR (OFF_SCALE + ROWS * 4)
#define OFF_BAR (OFF_FACTOR + 256)
#define SMEM (OFF_BAR + (2 * WST + 2 * XST + 1) * 8)
static_assert(W_BYTES % 1024 == 0, "stages of weights are aligned for the swizzle");
static_assert(CK == 1 || GP == 1, "parts of K are in one cluster, or all in different ones");
static_assert(TOK % PARTS == 0, "tokens are shared");
static_assert(WST * W_BYTES + XST * X_BYTES >= TOK * RS * 4, "sums fit into the rings");
static_assert(WST * W_BYTES >= TOK * RS * 4, "sums fit into the ring of weights");

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 rank) {
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r]; }" ::"r"(bar), "r"(rank) : "memory");
}
__device__ __forceinline__ u32 bar_try(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ __noinline__ void bar_wait_slow(u32 bar, u32 parity) {
    u64 begin = now();
    while (!bar_try(bar, parity))
        if (now() - begin > 400000000ull) asm volatile("trap;");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    u64 begin = 0;
    while (!bar_try(bar, parity)) {
        u64 t = now();
        if (begin == 0) begin = t;
        if (t - begin > 400000000ull) asm volatile("trap;");
    }
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define TAIL(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "r"(add)
__device__ __forceinline__ void wgmma(float (&d)[NACC], const u32* a, u64 desc, int add) {
#if TOK == 8
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
        : D4(0) : TAIL(a));
#elif TOK == 16
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
        : D8(0) : TAIL(a));
#elif TOK == 32
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
        : D8(0), D8(8) : TAIL(a));
#else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
        : D8(0), D8(8), D8(16), D8(24) : TAIL(a));
#endif
}

// K-major, 128-byte swizzle: groups of 8 tokens lie 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ uint4 lds128(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void widen(u32 word, u32& low, u32& high) {
    asm("{ .reg .b16 p, q; mov.b32 {p, q}, %2; cvt.rn.f16x2.e4m3x2 %0, p; cvt.rn.f16x2.e4m3x2 %1, q; }" : "=r"(low), "=r"(high) : "r"(word));
}
__device__ __forceinline__ u16 to_bf16(float v) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
}
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ u32 pack_bf16(float low, float high) { return (u32)to_bf16(low) | ((u32)to_bf16(high) << 16); }

__device__ __forceinline__ void depend() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void release_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, MINB)
few_product(const __grid_constant__ TMap map, const __grid_constant__ TMap map_x, const u8* __restrict__ x, const float* __restrict__ factors,
            const float* __restrict__ scales, const u16* __restrict__ residual, u16* __restrict__ y,
            int M, int N, int steps_in_all, int* __restrict__ where, float* __restrict__ partial, u32* __restrict__ counters) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_of(smem), tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 bars = base + OFF_BAR;
    const u32 full_w = bars, empty_w = full_w + 8 * WST, full_x = empty_w + 8 * WST, empty_x = full_x + 8 * XST;
    const u32 received = empty_x + 8 * XST;
    const u32 rank = blockIdx.x % CLUSTER, cn = rank % CN, ck = rank / CN;
    const u32 group = blockIdx.x / CLUSTER;
    const int tile = (group / GP) * CN + cn;
    const u32 part = GP > 1 ? group % GP : ck;
    const int features = N / HALVES;
    const int row0 = tile * HR;  // of each half
    const int begin = (int)part * steps_in_all / PARTS, steps = ((int)part + 1) * steps_in_all / PARTS - begin;
    int mine = M - (int)part * TD;  // tokens that this CTA finishes
    mine = mine < 0 ? 0 : mine > TD ? TD : mine;
    float* const scale_s = (float*)(smem + OFF_SCALE);
    float* const factor_s = (float*)(smem + OFF_FACTOR);

    const u32 producer = CONSUMERS / 32;  // its warp; the next one asks for x'
    auto ask = [&](int i, u64 policy) {
        const u32 slot = i % WST, bar = full_w + 8 * slot;
#if DIAG & 4
        bar_arrive(bar);
        return;
#endif
        bar_expect(bar, W_BYTES);
        for (int half = 0; half < HALVES; half++) {
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
                "r"(base + slot * W_BYTES + half * HR * STEP), "l"(&map), "r"((begin + i) * STEP), "r"(row0 + half * features), "r"(bar), "l"(policy) : "memory");
        }
    };
    if ((base & 0x3FFFF) != BASE) asm volatile("trap;");
    u64 policy = 0;
#if XT
    if (warp == producer + 1 && lane == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&map_x) : "memory");
#endif
    if (warp == producer) {
        if (lane == 0) {
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            for (int i = 0; i < WST; i++) { bar_init(full_w + 8 * i, 1); bar_init(empty_w + 8 * i, WG * 4); }
            for (int i = 0; i < XST; i++) { bar_init(full_x + 8 * i, 1); bar_init(empty_x + 8 * i, WG * 4 * CN); }
            bar_init(received, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            if (CK > 1 && mine > 0 && !(DIAG & 2)) bar_expect(received, (CK - 1) * mine * RS * 4);
            for (int i = 0; i < WST && i < steps; i++) ask(i, policy);
#if EARLY == 2
            release_dependents();
#endif
        }
        __syncwarp();
    }
    if (CLUSTER > 1) { cluster_arrive(); cluster_wait(); } else __syncthreads();

    if (warp == producer) {
        if (lane == 0) {
            for (int i = WST; i < steps; i++) {
                bar_wait(empty_w + 8 * (i % WST), (i / WST - 1) & 1);
                ask(i, policy);
            }
#if EARLY == 1
            release_dependents();
#endif
        }
        __syncwarp();
    } else if (warp == producer + 1) {
        if (lane == 0) {
            depend();
            const u8* from = x + (u64)begin * X_BYTES + cn * (X_BYTES / CN);
            for (int i = 0; i < steps; i++) {
                const u32 slot = i % XST, bar = full_x + 8 * slot;
                if (i >= XST) bar_wait(empty_x + 8 * slot, (i / XST - 1) & 1);
#if DIAG & 1
                bar_arrive(bar);
                continue;
#endif
                bar_expect(bar, X_BYTES);
                const u32 to = base + OFF_X + slot * X_BYTES + cn * (X_BYTES / CN);
#if XT
                const u32 at = (begin + i) * (2 * TOK) + cn * (2 * TOK / CN);
                if (CN > 1)
                    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::
                        "r"(to), "l"(&map_x), "r"(0), "r"(at), "r"(bar), "h"((u16)(((1 << CN) - 1) << (ck * CN))) : "memory");
                else
                    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                        "r"(to), "l"(&map_x), "r"(0), "r"(at), "r"(bar) : "memory");
#else
                if (CN > 1)
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
                        "r"(to), "l"(from), "r"((u32)(X_BYTES / CN)), "r"(bar), "h"((u16)(((1 << CN) - 1) << (ck * CN))) : "memory");
                else
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                        "r"(to), "l"(from), "r"((u32)X_BYTES), "r"(bar) : "memory");
#endif
                from += X_BYTES;
            }
            if (where != nullptr) { u32 sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)); where[blockIdx.x] = sm; }
        }
        __syncwarp();
    } else {
        const u32 wg = warp / 4, g = lane / 4, t = lane % 4;
        // First rows of this warp in each of its tiles, in the stage. Tiles may overlap: rows come twice then.
        u32 first[TM];
#pragma unroll
        for (int tm = 0; tm < TM; tm++) {
            constexpr u32 EACH = WG * TM / HALVES;  // tiles of a half
            const u32 half = TM == 2 && GATED ? tm : wg * TM / EACH;
            u32 in_half = TM == 2 && GATED ? wg * 64 : (wg * TM + tm) % EACH * 64;
            if (in_half > HR - 64) in_half = HR - 64;
            first[tm] = half * HR + in_half + 16 * (warp % 4);
        }
        float acc[SETS][NACC];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < NACC; i++) acc[set][i] = 0.0f;
#if MODE == 1
        float part_sums[SETS][NACC];
        const float* block[TM];
        float scale[TM];
#pragma unroll
        for (int tm = 0; tm < TM; tm++) {
            const int r = first[tm], row = r < HR ? row0 + r : row0 + features + r - HR;
            block[tm] = scales + (u64)((row < N ? row : N - 1) / 128) * steps_in_all + begin;
            scale[tm] = __ldg(block[tm]);
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int i = 0; i < NACC; i++) part_sums[set][i] = 0.0f;
#else
        for (int r = tid; r < ROWS; r += CONSUMERS) {
            const int row = r < HR ? row0 + r : row0 + features + r - HR;
            scale_s[r] = row < N ? __ldg(scales + row) : 0.0f;
        }
#endif
        u32 offset[TM];  // of this thread's first bytes in a stage, made so that they are not worked out again
#pragma unroll
        for (int tm = 0; tm < TM; tm++) {
            const u32 there = first[tm] * 128 + g * 128 + (((2 * t) ^ g) << 4) + base;
            asm volatile("mov.u32 %0, %1;" : "=r"(offset[tm]) : "r"(there));
        }
        u32 lane_here;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
        float factor = 1.0f;
        depend();
        if (tid < TOK && tid < M) asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(factor) : "l"(factors + tid) : "memory");
        u32 a[2][16];
        int ws = 0;
        u32 wp = 0, xp = 0;
        auto free_x = [&](int slot) {
            const u32 bar = empty_x + 8 * slot;
            __syncwarp();
            if (CN > 1) { if (lane_here < CN) bar_arrive_at(bar, ck * CN + lane_here); }
            else if (lane_here == 0) bar_arrive(bar);
        };
        for (int round = 0; round < steps; round += XST) {
#pragma unroll
            for (int xs = 0; xs < XST; xs++) {
                if (round + xs >= steps) break;
                const u32 w_at = ws * W_BYTES;
#if MODE == 1
                float following[TM];
                const int next = round + xs + 1 < steps ? round + xs + 1 : round + xs;
#pragma unroll
                for (int tm = 0; tm < TM; tm++) following[tm] = __ldg(block[tm] + next);
#endif
                bar_wait(full_w + 8 * ws, wp);
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int tm = 0; tm < TM; tm++) {
                        u32(&f)[16] = a[BUF(tm, j)];
                        const u32 at = (w_at + offset[tm]) ^ (j << 4);
                        const uint4 low = lds128(at), high = lds128(at + 1024);
                        widen(low.x, f[0], f[2]); widen(high.x, f[1], f[3]);
                        widen(low.y, f[4], f[6]); widen(high.y, f[5], f[7]);
                        widen(low.z, f[8], f[10]); widen(high.z, f[9], f[11]);
                        widen(low.w, f[12], f[14]); widen(high.w, f[13], f[15]);
                        if (tm == 0 && j == 0) bar_wait(full_x + 8 * xs, xp);
                        const u64 desc = descriptor(BASE + OFF_X + xs * X_BYTES + j * (TOK * 128));  // a constant
                        wgmma_fence();
#pragma unroll
                        for (int s = 0; s < 4; s++) {
#if MODE == 1
                            wgmma(part_sums[SET(tm, j)], f + 4 * s, desc + 2 * s, TM == 1 && SETS == 2 ? s > 0 : j + s > 0);
#else
                            wgmma(acc[SET(tm, j)], f + 4 * s, desc + 2 * s, 1);
#endif
                        }
                        wgmma_commit();
                        if (tm == TM - 1 && j == 1) {  // all of this warp's weights are in registers
                            __syncwarp();
                            if (lane_here == 0) bar_arrive(empty_w + 8 * ws);
                        }
                        if (TM == 2 && MODE == 0 && j == 1 && tm == 1) wgmma_wait<0>(); else wgmma_wait<1>();  // else C7513
                        if (MODE == 0 && tm == 0 && j == 0 && (xs > 0 || round > 0)) free_x((xs + XST - 1) % XST);
                    }
#if MODE == 1
                wgmma_wait<0>();
                free_x(xs);
#pragma unroll
                for (int tm = 0; tm < TM; tm++) {
#pragma unroll
                    for (int i = 0; i < NACC; i++)
                        acc[tm][i] += scale[tm] * (TM == 1 && SETS == 2 ? part_sums[0][i] + part_sums[SETS - 1][i] : part_sums[tm][i]);
                    scale[tm] = following[tm];
                }
#endif
                if (++ws == WST) ws = 0, wp ^= 1;
            }
            xp ^= 1;
        }
        wgmma_wait<0>();
        if (tid < TOK) factor_s[tid] = factor;
        consumers_sync();  // all weights of this CTA are consumed: sums take the place of their ring
        float* const sums = (float*)smem;  // [token][row], rows of RS
#pragma unroll
        for (int tm = 0; tm < TM; tm++)
#pragma unroll
            for (int i = 0; i < NACC; i++) {
                const int token = 8 * (i / 4) + 2 * t + (i & 1), row = first[tm] + g + 8 * ((i >> 1) & 1);
                if (PARTS == 1 || token < M) sums[token * RS + row] = TM == 1 && MODE == 0 && SETS == 2 ? acc[0][i] + acc[SETS - 1][i] : acc[tm][i];
            }
        if (CK > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        consumers_sync();
        constexpr int ITEMS = (TD * (HR / 4) + CONSUMERS - 1) / CONSUMERS;
        uint2 beside[GATED ? 1 : ITEMS];
        if (!GATED) {
#pragma unroll
            for (int n = 0; n < ITEMS; n++) {
                const int i = tid + n * CONSUMERS, token = i / (HR / 4), row = row0 + i % (HR / 4) * 4;
                beside[n] = make_uint2(0, 0);
                if (residual != nullptr && token < mine && row < N)
                    beside[n] = *(const uint2*)(residual + (u64)(part * TD + token) * N + row);
            }
        }
#if GP > 1
        // Sums of tokens that others finish: [tile][who finishes][whose][TD][ROWS].
        float* const tile_partial = partial + (u64)tile * (GP * GP * TD * ROWS);
        constexpr int QUADS = ROWS / 4;
        for (int i = tid; i < TOK * QUADS; i += CONSUMERS) {
            const int token = i / QUADS, r = i % QUADS * 4, to = token / TD;
            if (token < M && to != (int)part)
                __stcg((float4*)(tile_partial + ((to * GP + (int)part) * TD + token % TD) * ROWS + r), *(const float4*)(sums + token * RS + r));
        }
        __threadfence();
        consumers_sync();
        if (tid == 0) {
            u32 before, now_there;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + tile) : "memory");
            const u32 target = before / GP * GP + GP;  // every launch adds GP
            u64 since = 0;
            if (mine > 0)
                while (true) {
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now_there) : "l"(counters + tile) : "memory");
                    if ((int)(now_there - target) >= 0) break;
                    const u64 at = now();
                    if (since == 0) since = at;
                    if (at - since > 400000000ull) asm volatile("trap;");
                }
        }
        consumers_sync();
#endif
        if (CK > 1 && !(DIAG & 2)) {
            if (tid < CK && tid != ck) {
                const int to = tid;
                int count = M - to * TD;
                count = count < 0 ? 0 : count > TD ? TD : count;
                if (count > 0) {
                    const u32 slot = (int)ck < to ? ck : ck - 1;
                    u32 there, bar;
                    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(base + OFF_RECV + slot * (TD * RS * 4)), "r"((u32)(to * CN) + cn));
                    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(received), "r"((u32)(to * CN) + cn));
                    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                        "r"(there), "r"(base + (u32)(to * TD * RS * 4)), "r"((u32)(count * RS * 4)), "r"(bar) : "memory");
                }
            }
            __syncwarp();
            if (mine > 0) bar_wait(received, 0);
        }
#if GP == 1
        const float* const others = (const float*)(smem + OFF_RECV);
#endif
        auto total = [&](int token, int row) {  // of four rows, in the order of the parts
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                float4 v;
#if GP > 1
                if (p == (int)part) v = *(const float4*)(sums + (part * TD + token) * RS + row);
                else v = __ldcg((const float4*)(tile_partial + (((int)part * GP + p) * TD + token) * ROWS + row));
#else
                const float* from = p == (int)ck ? sums + (ck * TD + token) * RS
                                                : others + ((p < (int)ck ? p : p - 1) * TD + token) * RS;
                v = *(const float4*)(from + row);
#endif
                sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
            }
            const float f = factor_s[part * TD + token];
            float4 s = make_float4(1.f, 1.f, 1.f, 1.f);
            if (MODE == 0) s = *(const float4*)(scale_s + row);
            sum.x *= s.x * f; sum.y *= s.y * f; sum.z *= s.z * f; sum.w *= s.w * f;
            return sum;
        };
#pragma unroll
        for (int n = 0; n < ITEMS; n++) {
            const int i = tid + n * CONSUMERS, token = i / (HR / 4), r = i % (HR / 4) * 4, row = row0 + r;
            if (token < mine && row < features) {
                float4 v = total(token, r);
                if (GATED) {
                    const float4 u = total(token, HR + r);
                    v.x = v.x / (1.f + __expf(-v.x)) * u.x; v.y = v.y / (1.f + __expf(-v.y)) * u.y;
                    v.z = v.z / (1.f + __expf(-v.z)) * u.z; v.w = v.w / (1.f + __expf(-v.w)) * u.w;
                } else {
                    v.x += from_bf16(beside[GATED ? 0 : n].x & 0xFFFF); v.y += from_bf16(beside[GATED ? 0 : n].x >> 16);
                    v.z += from_bf16(beside[GATED ? 0 : n].y & 0xFFFF); v.w += from_bf16(beside[GATED ? 0 : n].y >> 16);
                }
                *(uint2*)(y + (u64)(part * TD + token) * features + row) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            }
        }
    }
    // No CTA may go while others write to it, or read what it sends.
    if (CLUSTER > 1) { cluster_arrive(); cluster_wait(); }
}

// x[M, K] in BF16 -> x' in FP16, scaled by a power of two for each token, as wgmma reads it from shared memory:
// [K / 128][2][TOK][64], 128-byte swizzle. Of 128 columns, place (j, s, h, t, b) holds column 32t + 16j + 4s + 2h + b.
extern "C" __global__ void __launch_bounds__(512)
few_lay_out(const u16* __restrict__ x, u8* __restrict__ out, float* __restrict__ factors, int M, int K) {
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ u32 largest_s[16];
    const int token = blockIdx.x, tid = threadIdx.x;
    release_dependents();
    depend();
    uint4* const row = (uint4*)smem;
    u32 largest = 0;
    if (token < M) {
        const uint4* from = (const uint4*)(x + (u64)token * K);
        for (int i = tid; i < K / 8; i += 512) {
            const uint4 v = from[i];
            row[i] = v;
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 low = (words[q] << 16) & 0x7FFFFFFF, high = words[q] & 0x7FFF0000;
                largest = max(largest, max(low, high));
            }
        }
    }
    largest = __reduce_max_sync(0xFFFFFFFF, largest);
    if (tid % 32 == 0) largest_s[tid / 32] = largest;
    __syncthreads();
    largest = __reduce_max_sync(0xFFFFFFFF, largest_s[tid % 16]);
    int exponent = 268 - (int)(largest >> 23);
    exponent = exponent > 253 ? 253 : exponent;
    const float power = __uint_as_float((u32)exponent << 23);
    if (tid == 0) factors[token] = __uint_as_float((u32)(254 - exponent) << 23);
    const u32* const pairs = (const u32*)smem;
    for (int c = tid; c < K / 8; c += 512) {
        const int step = c / 16, j = c / 8 % 2, chunk = c % 8, s = chunk / 2, h = chunk % 2;
        u32 words[4] = {0, 0, 0, 0};
        if (token < M) {
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const u32 pair = pairs[step * 64 + 16 * t + 8 * j + 2 * s + h];
                const float low = __uint_as_float(pair << 16) * power, high = __uint_as_float(pair & 0xFFFF0000) * power;
                asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[t]) : "f"(high), "f"(low));
            }
        }
        u8* to = out + (u64)step * X_BYTES + j * (TOK * 128) + token * 128 + ((chunk ^ (token & 7)) << 4);
        *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
