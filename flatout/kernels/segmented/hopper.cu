// One product over several segments of K, in one accumulator, for Hopper (sm_90a); compiled by hopper.py.
//
//   out[m, n] = column_scale[n] * sum_i row_scale_i[m] * (X_i W_i^T)[m, n] + (low wide^T)[m, n]
//
// Each adapter's columns of the result are a matrix of their own.
// X_i (M, K_i) and W_i (N, K_i) are float8 e4m3 with scales, or bfloat16 without; low (M, R), wide (N, R) and out are
// bfloat16. With WEIGHTS_KN, bfloat16 W_i are (K_i, N). The structure is that of CUTLASS's cooperative Hopper kernels:
// a CTA has a warp group that loads tiles by TMA into a ring of stages, and two that multiply, 64 rows each. The two CTAs
// of a cluster work on neighboring rows, and each multicasts half of a tile's weights to both.
//
// Macros: FP8, WEIGHTS_KN (0 or 1), STAGES, RASTER_ROWS (cluster tiles that are traversed together, for the L2 cache).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// CUtensorMap
struct alignas(64) Map { u64 words[16]; };

// as in hopper.py
struct Params {
  Map x[4], w[4], out[3];  // x and w of each segment, then low and wide; out of each adapter
  const float* row_scale[3];
  const float* column_scale;
  int m, n, num_segments, k_steps[3];
  // each adapter's first column, rank and column of tiles: wide is block-diagonal
  int first_column[4], first_rank[4], first_tile[3], tiles_across;
};

constexpr int ROWS = 128, COLUMNS = 256;
// bytes of K in a stage, which is a row of the swizzled tile
constexpr int STEP_BYTES = 128;
constexpr int X_BYTES = ROWS * STEP_BYTES, STAGE_BYTES = X_BYTES + COLUMNS * STEP_BYTES;
constexpr int CHUNK_BYTES = 64 * STEP_BYTES;
constexpr int OUT_BYTES = 64 * COLUMNS * 2;
constexpr int STEP_ELEMENTS = FP8 ? 128 : 64;
constexpr int LOADER = 2;

static_assert(!(FP8 && WEIGHTS_KN), "float8 wgmma reads K-major operands only");

#define ACCUMULATORS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACCUMULATORS16(i) ACCUMULATORS4(i), ACCUMULATORS4(i + 4), ACCUMULATORS4(i + 8), ACCUMULATORS4(i + 12)
#define ACCUMULATORS64(i) ACCUMULATORS16(i), ACCUMULATORS16(i + 16), ACCUMULATORS16(i + 32), ACCUMULATORS16(i + 48)
#define REGISTERS \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
// d = a b^T + (add ? d : 0) for 64 rows, 256 columns and 32 bytes of K
#define MULTIPLY(NAME, KIND, TRANSPOSED)                                                             \
  __device__ __forceinline__ void NAME(float (&d)[128], u64 a, u64 b, int add) {                     \
    asm volatile(                                                                                    \
        "{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned." KIND " " REGISTERS    \
        ", %128, %129, p, 1, 1" TRANSPOSED ";}"                                                      \
        : ACCUMULATORS64(0), ACCUMULATORS64(64)                                                      \
        : "l"(a), "l"(b), "r"(add));                                                                 \
  }
MULTIPLY(multiply_fp8, "m64n256k32.f32.e4m3.e4m3", "")
MULTIPLY(multiply_bf16, "m64n256k16.f32.bf16.bf16", ", 0, 0")
MULTIPLY(multiply_bf16_kn, "m64n256k16.f32.bf16.bf16", ", 0, 1")

// the compiler must not move accumulators across an asynchronous product
__device__ __forceinline__ void hold(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void begin_products(float (&d)[128]) {
  hold(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// end a group of products, and wait until at most PENDING groups are left
template <int PENDING>
__device__ __forceinline__ void end_products(float (&d)[128]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  hold(d);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_products(float (&d)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold(d);
}

// wgmma's descriptor of a K-major tile in shared memory: 128-byte swizzle, 1,024 bytes between groups of 8 rows
__device__ __forceinline__ u64 k_major(u32 at) {
  return (u64)((at >> 4) & 0x3FFF) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// the same of an MN-major tile: chunks of 64 columns and 64 K
__device__ __forceinline__ u64 mn_major(u32 at) {
  return (u64)((at >> 4) & 0x3FFF) | ((u64)(CHUNK_BYTES >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// arrive at a barrier of a CTA of this cluster
__device__ __forceinline__ void arrive(u32 barrier, u32 cta) {
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}"
               ::"r"(barrier), "r"(cta) : "memory");
}

__device__ __forceinline__ void load(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((u16)3) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// the next stage, and its barriers' phase parity, which flips each time the ring wraps
struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

// its columns are those of one adapter; an adapter's last tile computes columns past its end and does not store them
struct Tile { int row, column, adapter, first_rank, num_ranks; };

__device__ __forceinline__ Tile tile_at(const Params& p, int index, u32 cta_rank) {
  int pairs = (p.m + 2 * ROWS - 1) / (2 * ROWS);
  int group = index / (RASTER_ROWS * p.tiles_across), within = index % (RASTER_ROWS * p.tiles_across);
  int height = min(pairs - group * RASTER_ROWS, RASTER_ROWS), across = within / height;
  Tile tile;
  tile.row = (2 * (group * RASTER_ROWS + within % height) + cta_rank) * ROWS;
  tile.adapter = (across >= p.first_tile[1]) + (across >= p.first_tile[2]);
  tile.column = p.first_column[tile.adapter] + (across - p.first_tile[tile.adapter]) * COLUMNS;
  // TMA needs 16 bytes of alignment; the ranks before are those of other adapters
  tile.first_rank = p.first_rank[tile.adapter] & ~7;
  tile.num_ranks = p.first_rank[tile.adapter + 1] - tile.first_rank;
  return tile;
}

__device__ void load_tiles(const Params& p, u32 stages, u32 full, u32 empty, u32 cta_rank, int num_tiles) {
  Ring ring;
  for (int index = blockIdx.x / 2; index < num_tiles; index += gridDim.x / 2) {
    Tile tile = tile_at(p, index, cta_rank);
    for (int i = 0; i <= p.num_segments; ++i) {
      bool is_low = i == p.num_segments;
      const Map *x = &p.x[is_low ? 3 : i], *w = &p.w[is_low ? 3 : i];
      int num_steps = is_low ? (tile.num_ranks + 63) / 64 : p.k_steps[i];
      for (int step = 0; step < num_steps; ++step, ring.next()) {
        u32 barrier = full + 8 * ring.stage, to = stages + ring.stage * STAGE_BYTES;
        int k = is_low ? tile.first_rank + 64 * step : STEP_ELEMENTS * step;
        wait(empty + 8 * ring.stage, ring.phase ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(barrier), "r"(STAGE_BYTES) : "memory");
        load(to, x, barrier, k, tile.row);
        if (WEIGHTS_KN && !is_low) {
          for (int chunk = 2 * cta_rank; chunk < 2 * cta_rank + 2; ++chunk)
            load_for_both(to + X_BYTES + chunk * CHUNK_BYTES, w, barrier, tile.column + 64 * chunk, k);
        } else {
          load_for_both(to + X_BYTES + cta_rank * 2 * CHUNK_BYTES, w, barrier, k, tile.column + cta_rank * COLUMNS / 2);
        }
      }
    }
  }
}

__device__ __forceinline__ float value(const float* values, int index, int size) {
  return index < size ? values[index] : 0.f;
}

__device__ void multiply_tiles(const Params& p, u32 stages, u32 full, u32 empty, u32 cta_rank, int num_tiles,
                               int warp_group, u32 staging, float* scales) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  Ring ring;
  float d[128];
  // the stage that products in flight read
  int held = -1;
  auto release = [&]() {
    if (held >= 0 && thread < 2) arrive(empty + 8 * held, thread);
    held = -1;
  };
  for (int index = blockIdx.x / 2; index < num_tiles; index += gridDim.x / 2) {
    Tile tile = tile_at(p, index, cta_rank);
    int top = tile.row + warp_group * 64, row = top + thread / 32 * 16 + lane / 4, add = 0;
    // prefetched, as they are used after many products
    float scale = 0.f, lower_scale = 0.f, column_scale[2] = {0.f, 0.f};
    if (FP8) {
      scale = value(p.row_scale[0], row, p.m);
      lower_scale = value(p.row_scale[0], row + 8, p.m);
      for (int i = 0; i < 2; ++i) column_scale[i] = value(p.column_scale, tile.column + 2 * thread + i, p.n);
    }
    float next_scale = scale, next_lower_scale = lower_scale;
    for (int i = 0; i < p.num_segments; ++i) {
      if (FP8 && i > 0) {
        // rescale to this segment's row scales, which are positive in all valid rows
        wait_products(d);
        release();
        float ratio = row < p.m ? scale / next_scale : 0.f;
        float lower_ratio = row + 8 < p.m ? lower_scale / next_lower_scale : 0.f;
#pragma unroll
        for (int j = 0; j < 128; j += 4) {
          d[j] *= ratio; d[j + 1] *= ratio;
          d[j + 2] *= lower_ratio; d[j + 3] *= lower_ratio;
        }
        scale = next_scale;
        lower_scale = next_lower_scale;
      }
      if (FP8 && i + 1 < p.num_segments) {
        next_scale = value(p.row_scale[i + 1], row, p.m);
        next_lower_scale = value(p.row_scale[i + 1], row + 8, p.m);
      }
      for (int step = 0; step < p.k_steps[i]; ++step, ring.next()) {
        u32 at = stages + ring.stage * STAGE_BYTES;
        u64 x = k_major(at + warp_group * 64 * STEP_BYTES);
        u64 w = WEIGHTS_KN ? mn_major(at + X_BYTES) : k_major(at + X_BYTES);
        wait(full + 8 * ring.stage, ring.phase);
        begin_products(d);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (FP8) multiply_fp8(d, x + 2 * k, w + 2 * k, add);
          else if (WEIGHTS_KN) multiply_bf16_kn(d, x + 2 * k, w + 128 * k, add);
          else multiply_bf16(d, x + 2 * k, w + 2 * k, add);
          add = 1;
        }
        end_products<1>(d);
        release();
        held = ring.stage;
      }
    }
    wait_products(d);
    release();
    if (FP8) *(float2*)(scales + 2 * thread) = float2{column_scale[0], column_scale[1]};
    // TMA has read the previous tile from staging, and the scales are written
    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(warp_group + 1) : "memory");
    if (FP8) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        float2 column = *(const float2*)(scales + 8 * j + lane % 4 * 2);
        d[4 * j] *= scale * column.x; d[4 * j + 1] *= scale * column.y;
        d[4 * j + 2] *= lower_scale * column.x; d[4 * j + 3] *= lower_scale * column.y;
      }
    }
    for (int left = tile.num_ranks; left > 0; left -= 64, ring.next()) {
      u32 at = stages + ring.stage * STAGE_BYTES;
      u64 x = k_major(at + warp_group * 64 * STEP_BYTES), w = k_major(at + X_BYTES);
      wait(full + 8 * ring.stage, ring.phase);
      begin_products(d);
      for (int k = 0; k < 4 && 16 * k < left; ++k) multiply_bf16(d, x + 2 * k, w + 2 * k, 1);
      end_products<0>(d);
      hold(d);
      held = ring.stage;
      release();
    }
    // to chunks of 64 columns in shared memory, swizzled like the inputs, and from there by TMA
    int own_row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(d[4 * j + 2 * i + 1]), "f"(d[4 * j + 2 * i]));
      u32 to = staging + j / 8 * CHUNK_BYTES + own_row * STEP_BYTES + ((j % 8 + lane / 16) ^ own_row % 8) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(warp_group + 1) : "memory");
    if (thread == 0 && top < p.m) {
      int first = p.first_column[tile.adapter], end = p.first_column[tile.adapter + 1];
      for (int chunk = 0; chunk < COLUMNS / 64 && tile.column + 64 * chunk < end; ++chunk)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                     ::"l"(&p.out[tile.adapter]), "r"(staging + chunk * CHUNK_BYTES),
                     "r"(tile.column + 64 * chunk - first), "r"(top)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    segmented_product(const __grid_constant__ Params p) {
  extern __shared__ char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  __shared__ float scales[2][COLUMNS];
  // tiles with a 128-byte swizzle must be aligned to 1,024 bytes
  u32 staging = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u, stages = staging + 2 * OUT_BYTES;
  u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES, cta_rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta_rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      // filled by one thread's loads; emptied by the two warp groups of both CTAs
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(empty + 8 * i));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  meet_cluster();
  int num_tiles = (p.m + 2 * ROWS - 1) / (2 * ROWS) * p.tiles_across, warp_group = threadIdx.x / 128;
  if (warp_group == LOADER) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) load_tiles(p, stages, full, empty, cta_rank, num_tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles(p, stages, full, empty, cta_rank, num_tiles, warp_group, staging + warp_group * OUT_BYTES,
                   scales[warp_group]);
  }
  // a CTA may not exit while its peer can still multicast into its shared memory or arrive at its barriers
  meet_cluster();
}
