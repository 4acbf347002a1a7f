// Gradients of an adapter's matrices from float8 rows, for Hopper (sm_90a); compiled and launched by gradient.py.
//
//   out[c, r] = column_scale[c] * sum_t row_scale[t] * part[t, c] * low[t, r]
//
// part e4m3 (T, C), low bfloat16 (T, R), out fp32. A cluster of CTAs computes 128 columns. A team of TEAM warps reads 32
// tokens at a time by TMA, which fills what is out of bounds with zeros; each of its warps multiplies VEC of every 16
// columns, and the teams' sums are added in a fixed order. Tensor cores multiply bfloat16, with the columns of part as
// their rows: each thread turns the bytes of its four tokens and its VEC columns by itself. Which columns are which rows
// of an operand is chosen so that a thread's columns are contiguous in memory.
//
// Macros: VEC (columns of a thread: 16, 8 or 4), RANKS (R rounded up to a multiple of 16), STAGES.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// CUtensorMap
struct alignas(64) Map { u64 words[16]; };

// as in gradient.py
struct Params {
  Map part, low, row_scale;
  const float* column_scale;
  float* out;
  int column_pitch, rank_pitch, num_tokens, num_columns, num_ranks;
};

constexpr int WARPS = 8, THREADS = 32 * WARPS, CLUSTER = 8, TILE = 128, STEP = 32;
constexpr int TEAM = 16 / VEC, NUM_TEAMS = WARPS / TEAM;
constexpr int COLUMN_PAIRS = VEC / 2, WORDS = VEC / 4, RANK_TILES = RANKS / 8, RANK_BLOCKS = RANKS / 16;
// bytes of a stage of a team: part and low of 32 tokens, low in blocks of 16 ranks, and the tokens' scales
constexpr int PART_BYTES = STEP * TILE, BLOCK_BYTES = STEP * 32, LOW_BYTES = RANK_BLOCKS * BLOCK_BYTES;
constexpr int SCALE_BYTES = STEP * 4, COPIED_BYTES = PART_BYTES + LOW_BYTES + SCALE_BYTES;

// byte INDEX of two words of e4m3 as bfloat16, times a scale of each. Exponent and mantissa stay as they are, which is
// the value times 2^-120; the lower value's sign, which prmt writes to the byte above it, is shifted to its place.
template <int INDEX>
__device__ __forceinline__ u32 scaled(u32 lower, u32 upper, u32 scales) {
  int bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(lower), "r"(upper), "n"(0x4800 + 0x1111 * INDEX));
  u32 values = (bytes >> 4) & 0x87f087f0;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(scales));
  return values;
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// columns INDEX and INDEX + 1 of a word, of four tokens, times all ranks
template <int INDEX>
__device__ __forceinline__ void multiply_pair(float (&d)[RANK_TILES][4], const u32 (&words)[4][WORDS], int word,
                                              const u32 (&scales)[2], const u32 (&b)[RANK_TILES][2]) {
  u32 a[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = scaled<INDEX>(words[2 * i][word], words[2 * i + 1][word], scales[i]);
    a[2 * i + 1] = scaled<INDEX + 1>(words[2 * i][word], words[2 * i + 1][word], scales[i]);
  }
#pragma unroll
  for (int j = 0; j < RANK_TILES; ++j) multiply(d[j], a, b[j]);
}

// four 8 x 8 matrices of bfloat16, transposed; each thread gives the address of a row
__device__ __forceinline__ void load_matrices(u32 (&first)[2], u32 (&second)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(first[0]), "=r"(first[1]), "=r"(second[0]), "=r"(second[1])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ float2 load_two(u32 from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void load_words(u32 (&words)[WORDS], u32 from) {
  if constexpr (WORDS == 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  else if constexpr (WORDS == 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
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
    narrow_gradient(const __grid_constant__ Params p) {
  extern __shared__ char shared[];
  __shared__ alignas(8) u64 barriers[NUM_TEAMS * STAGES];
  // tiles with a 128-byte swizzle must be aligned to 1,024 bytes
  u32 start = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u, cta_rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta_rank));
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  int team = warp / TEAM, member = warp % TEAM;
  // of this team, in its stages
  u32 parts = start + team * STAGES * PART_BYTES;
  u32 lows = start + NUM_TEAMS * STAGES * PART_BYTES + team * STAGES * LOW_BYTES;
  u32 scales_at = start + NUM_TEAMS * STAGES * (PART_BYTES + LOW_BYTES) + team * STAGES * SCALE_BYTES;
  u32 full = (u32)__cvta_generic_to_shared(barriers) + team * STAGES * 8;
  int first_column = blockIdx.x / CLUSTER * TILE;
  constexpr int STRIDE = CLUSTER * NUM_TEAMS * STEP;
  int first_token = (cta_rank * NUM_TEAMS + team) * STEP;
  int num_steps = (p.num_tokens - first_token + STRIDE - 1) / STRIDE;

  auto load = [&](int step, int stage) {
    int token = first_token + step * STRIDE;
    u32 barrier = full + 8 * stage;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(COPIED_BYTES) : "memory");
    copy(parts + stage * PART_BYTES, &p.part, barrier, first_column, token);
    for (int j = 0; j < RANK_BLOCKS; ++j)
      copy(lows + stage * LOW_BYTES + j * BLOCK_BYTES, &p.low, barrier, 16 * j, token);
    copy(scales_at + stage * SCALE_BYTES, &p.row_scale, barrier, token, 0);
  };
  bool loads = member == 0 && lane == 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_TEAMS * STAGES; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(barriers) + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (loads)
    for (int step = 0; step < STAGES - 1 && step < num_steps; ++step) load(step, step);

  // of 16 tokens, a thread's are 2 quad, 2 quad + 1, 2 quad + 8 and 2 quad + 9; TMA's swizzles xor 16-byte chunks of part with
  // the token, and those of low, of which 8 rows are 256 bytes, with the token / 4
  u32 own_words = 2 * quad * TILE + ((16 * group + VEC * member) ^ 32 * quad), odd = (own_words ^ 16) + TILE;
  int own_row = lane % 16;
  u32 own_low = own_row * 32 + (lane / 16 ^ own_row / 4 % 2) * 16;
  float d[COLUMN_PAIRS][RANK_TILES][4] = {};
  int stage = 0, parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    wait(full + 8 * stage, parity);
    // the stage of the step before has been read
    meet_team(team);
    if (loads && step + STAGES - 1 < num_steps) load(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 words[4][WORDS], b[RANK_TILES][2], from = parts + stage * PART_BYTES + half * PART_BYTES / 2;
      load_words(words[0], from + own_words);
      load_words(words[1], from + odd);
      load_words(words[2], from + own_words + 8 * TILE);
      load_words(words[3], from + odd + 8 * TILE);
      from = lows + stage * LOW_BYTES + half * BLOCK_BYTES / 2 + own_low;
#pragma unroll
      for (int j = 0; j < RANK_BLOCKS; ++j) load_matrices(b[2 * j], b[2 * j + 1], from + j * BLOCK_BYTES);
      from = scales_at + stage * SCALE_BYTES + half * SCALE_BYTES / 2 + 8 * quad;
      float2 upper = load_two(from), lower = load_two(from + 32);
      // 2^100, so that products with 2^-120 are far from the ends of bfloat16
      u32 scales[2] = {pack(upper.x * 0x1p100f, upper.y * 0x1p100f), pack(lower.x * 0x1p100f, lower.y * 0x1p100f)};
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        multiply_pair<0>(d[2 * word], words, word, scales, b);
        multiply_pair<2>(d[2 * word + 1], words, word, scales, b);
      }
    }
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }

  // the sums of each team, (TILE, RANKS), then those of the CTA in the first, then those of the cluster
  __syncthreads();
  float* sums = (float*)(shared + (start - (u32)__cvta_generic_to_shared(shared)));
#pragma unroll
  for (int pair = 0; pair < COLUMN_PAIRS; ++pair)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < RANK_TILES; ++j) {
        // columns in the order of a thread's 16, then of the groups
        int order = (VEC * member + 2 * pair + i) * 8 + group;
        *(float2*)(sums + (team * TILE + order) * RANKS + 8 * j + 2 * quad) =
            float2{d[pair][j][2 * i], d[pair][j][2 * i + 1]};
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
    for (int other = 0; other < CLUSTER; ++other) sum += read_peer(start + 4 * at, other);
    if (own_column < p.num_columns && rank < p.num_ranks) {
      float scale = p.column_scale ? p.column_scale[own_column] : 1.f;
      p.out[own_column * p.column_pitch + rank * p.rank_pitch] = sum * 0x1p20f * scale;
    }
  }
  // a CTA may not exit while others read its sums
  meet_cluster();
}
