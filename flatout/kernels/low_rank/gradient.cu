// Gradients of an adapter's matrices from float8 rows, for Hopper (sm_90a); compiled and launched by gradient.py.
//
//   out[c, r] = column_scale[c] * sum_t row_scale[t] * part[t, c] * low[t, r]
//
// part e4m3 (T, C), low bfloat16 (T, R), out fp32. C is a multiple of 16, rows of both begin at multiples of 16 bytes,
// rows of low can be read up to a multiple of 8 ranks, and row scales are below 2^28. A cluster of CTAs computes
// 128 columns. A team of TEAM warps reads 16 tokens at a time, each warp multiplies VEC of every 16 columns, and the
// teams' sums are added in a fixed order. Tensor cores multiply bfloat16, with the columns of part as their rows: each
// thread turns the bytes of its four tokens and its VEC columns by itself. The order of tokens, columns and ranks within
// an operand is chosen so that what a thread needs is contiguous in memory.
//
// Macros: VEC (columns of a thread: 16, 8 or 4), RANKS (R rounded up to a multiple of 16), STAGES.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// as in gradient.py
struct Params {
  const u8* part;
  const float* row_scale;
  const u8* low;
  const float* column_scale;
  float* out;
  u32 part_pitch, low_pitch;  // in bytes
  int column_pitch, rank_pitch, num_tokens, num_columns, num_ranks;
};

constexpr int WARPS = 8, THREADS = 32 * WARPS, CLUSTER = 8, TILE = 128, STEP = 16;
constexpr int TEAM = 16 / VEC, NUM_TEAMS = WARPS / TEAM;
constexpr int COLUMN_PAIRS = VEC / 2, WORDS = VEC / 4, RANK_TILES = RANKS / 8, RANK_BLOCKS = RANKS / 16;
// bytes of a team's stage: part and low of 16 tokens, low in blocks of 16 ranks, and the tokens' scales
constexpr int PART_BYTES = STEP * TILE, BLOCK_BYTES = STEP * 32, LOW_BYTES = RANK_BLOCKS * BLOCK_BYTES;
constexpr int TEAM_BYTES = PART_BYTES + LOW_BYTES + 128, STAGE_BYTES = NUM_TEAMS * TEAM_BYTES;

__device__ __forceinline__ void copy(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// where byte `at` of token `token` is, with rows of `row_bytes`: 16-byte chunks are permuted within 128 bytes, so that
// threads that read different tokens read different banks
__device__ __forceinline__ int swizzled(int token, int at, int row_bytes) {
  return (token * row_bytes + at) ^ (token / 4 * 32);
}

// byte `index` of two words of e4m3 as bfloat16, times 2^-120: exponent and mantissa stay as they are; the sign of the
// lower value, which prmt writes to the byte above it, is shifted to its place
template <int INDEX>
__device__ __forceinline__ u32 as_bf16(u32 lower, u32 upper) {
  int bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(lower), "r"(upper), "n"(0x4800 + 0x1111 * INDEX));
  return (bytes >> 4) & 0x87f087f0;
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ float low_half(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// columns INDEX and INDEX + 1 of a word, of four tokens, times all ranks
template <int INDEX>
__device__ __forceinline__ void multiply_pair(float (&d)[RANK_TILES][4], const u32 (&words)[4][WORDS], int word,
                                              const u32 (&b)[RANK_TILES][2]) {
  u32 a[4] = {as_bf16<INDEX>(words[0][word], words[1][word]), as_bf16<INDEX + 1>(words[0][word], words[1][word]),
              as_bf16<INDEX>(words[2][word], words[3][word]), as_bf16<INDEX + 1>(words[2][word], words[3][word])};
#pragma unroll
  for (int j = 0; j < RANK_TILES; ++j) multiply(d[j], a, b[j]);
}

__device__ __forceinline__ void meet_team(int team) {
  if (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * TEAM) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ float read_peer(u32 address, u32 cta) {
  float value;
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %1, %2; ld.shared::cluster.f32 %0, [r];}"
               : "=f"(value)
               : "r"(address), "r"(cta)
               : "memory");
  return value;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, VEC * RANKS <= 256 ? 2 : 1)
    lora_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ float4 shared[];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  int team = warp / TEAM, member = warp % TEAM;
  u32 cta_rank, all_sums = (u32)__cvta_generic_to_shared(shared), base = all_sums + team * TEAM_BYTES;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta_rank));
  int first_column = blockIdx.x / CLUSTER * TILE;
  constexpr int STRIDE = CLUSTER * NUM_TEAMS * STEP;
  int first_token = (cta_rank * NUM_TEAMS + team) * STEP, last_token = p.num_tokens - 1;
  int num_steps = (p.num_tokens - first_token + STRIDE - 1) / STRIDE;

  // columns, ranks and tokens past the end are copies of others: their results are not written, or their scale is 0
  auto load = [&](int step) {
    if (step < num_steps) {
      int token = first_token + step * STRIDE;
      u32 to = base + step % STAGES * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < PART_BYTES / 512 / TEAM; ++i) {
        int own = (i * TEAM + member) * 4 + lane / 8, at = lane % 8 * 16;
        u32 row = min(token + own, last_token), column = first_column + at < p.num_columns ? first_column + at : 0;
        copy(to + swizzled(own, at, TILE), p.part + column + (u64)row * p.part_pitch);
      }
      u32 low_row = min(token + lane / 2, last_token);
      for (int i = member; i < RANK_BLOCKS; i += TEAM) {
        u32 rank = 16 * i + lane % 2 * 8;
        rank = rank < p.num_ranks ? rank : 0;
        copy(to + PART_BYTES + i * BLOCK_BYTES + swizzled(lane / 2, lane % 2 * 16, 32),
             p.low + 2 * rank + (u64)low_row * p.low_pitch);
      }
      if (member == 0 && lane < 4) {
        int own = token + 4 * lane, num_bytes = min(4 * max(p.num_tokens - own, 0), 16);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to + PART_BYTES + LOW_BYTES + 16 * lane), "l"(p.row_scale + min(own, last_token & ~3)),
                     "r"(num_bytes) : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float d[COLUMN_PAIRS][RANK_TILES][4] = {};
  for (int step = 0; step < STAGES - 1; ++step) load(step);
  for (int step = 0; step < num_steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    meet_team(team);
    const u8* stage = (const u8*)shared + team * TEAM_BYTES + step % STAGES * STAGE_BYTES;
    u32 words[4][WORDS], b[RANK_TILES][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u8* own = stage + swizzled(4 * quad + i, 16 * group + VEC * member, TILE);
      if constexpr (WORDS == 4) {
        uint4 all = *(const uint4*)own;
        words[i][0] = all.x; words[i][1] = all.y; words[i][2] = all.z; words[i][3] = all.w;
      } else if constexpr (WORDS == 2) {
        uint2 all = *(const uint2*)own;
        words[i][0] = all.x; words[i][1] = all.y;
      } else {
        words[i][0] = *(const u32*)own;
      }
    }
    float4 scales = *(const float4*)(stage + PART_BYTES + LOW_BYTES + 16 * quad);
    // 2^100, so that products with 2^-120 are far from the ends of fp32
    float scale[4] = {scales.x * 0x1p100f, scales.y * 0x1p100f, scales.z * 0x1p100f, scales.w * 0x1p100f};
#pragma unroll
    for (int j = 0; j < RANK_BLOCKS; ++j) {
      // ranks 16 j + 2 group and the next
      u32 pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pair[i] = *(const u32*)(stage + PART_BYTES + j * BLOCK_BYTES + swizzled(4 * quad + i, 4 * group, 32));
      b[2 * j][0] = pack(low_half(pair[0]) * scale[0], low_half(pair[1]) * scale[1]);
      b[2 * j][1] = pack(low_half(pair[2]) * scale[2], low_half(pair[3]) * scale[3]);
      b[2 * j + 1][0] = pack(high_half(pair[0]) * scale[0], high_half(pair[1]) * scale[1]);
      b[2 * j + 1][1] = pack(high_half(pair[2]) * scale[2], high_half(pair[3]) * scale[3]);
    }
    load(step + STAGES - 1);
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      multiply_pair<0>(d[2 * word], words, word, b);
      multiply_pair<2>(d[2 * word + 1], words, word, b);
    }
  }

  // the sums of each team, (TILE, RANKS), then those of the CTA in the first, then those of the cluster
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  float* sums = (float*)shared;
#pragma unroll
  for (int pair = 0; pair < COLUMN_PAIRS; ++pair)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < RANK_BLOCKS; ++j) {
        const float(&even)[4] = d[pair][2 * j], (&odd)[4] = d[pair][2 * j + 1];
        // columns in the order of a thread's 16, then of the groups
        int order = (VEC * member + 2 * pair + i) * 8 + group;
        *(float4*)(sums + (team * TILE + order) * RANKS + 16 * j + 4 * quad) =
            float4{even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]};
      }
  __syncthreads();
  for (int i = threadIdx.x * 4; i < TILE * RANKS; i += THREADS * 4) {
    float4 sum = *(const float4*)(sums + i);
#pragma unroll
    for (int other = 1; other < NUM_TEAMS; ++other) {
      float4 more = *(const float4*)(sums + other * TILE * RANKS + i);
      sum.x += more.x; sum.y += more.y; sum.z += more.z; sum.w += more.w;
    }
    *(float4*)(sums + i) = sum;
  }
  meet_cluster();
  constexpr int SHARE = TILE * RANKS / CLUSTER;
  for (int i = threadIdx.x; i < SHARE; i += THREADS) {
    int at = cta_rank * SHARE + i, order = at / RANKS, rank = at % RANKS;
    int own_column = first_column + order % 8 * 16 + order / 8;
    float sum = 0.f;
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) sum += read_peer(all_sums + 4 * at, other);
    if (own_column < p.num_columns && rank < p.num_ranks) {
      float scale = p.column_scale ? p.column_scale[own_column] : 1.f;
      p.out[own_column * p.column_pitch + rank * p.rank_pitch] = sum * 0x1p20f * scale;
    }
  }
  // a CTA may not exit while others read its sums
  meet_cluster();
}
