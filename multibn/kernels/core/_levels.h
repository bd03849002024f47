/* The innermost loops for each set of instructions, and the one in use. */

#define INLINE static inline __attribute__((always_inline))
_Static_assert(sizeof(void *) == 8, "addresses and sizes are 64-bit numbers here");

/* Planes of at least so many elements are long: they are handled without a tile. */
#define LONG 16
#define LONG_TO_SUM 64 /* a sum has its start and end to pay for, too */
#define BLOCK 512      /* values summed in the dtype of the arithmetic, and values widened at a time */
#define COLUMNS 2048   /* of a tile: the coefficients and sums of so many stay in the nearest caches */
#define BESIDE 512     /* up to so many columns, short samples stand side by side */
#define CHUNK 65536    /* elements in a row of a pass that goes backwards */
#define STREAMED (2 << 20) /* bytes of an output from which stores are non-temporal */
#define FAR (8 << 20)      /* bytes of an activation that no cache holds, when sums are made */
#define AHEAD 4096     /* distance of prefetches in bytes: a page, since a TLB miss takes longest */
#define RUN 16         /* rows of a tile summed before the sums move to float64; more where so many */
#define LONG_RUN 64    /* sums follow that their errors average out */
#define FEW 8          /* values whose mean is the first centre */
#define DISTANT 4      /* standard deviations from centre to mean that make a second pass worthwhile */

/* Of sums, those of x - mean. Of sums and of the gradient of x: dy; dy where the output of ReLU, made again from x, or
read, is positive. And of the output. */
enum { MOMENTS, GRADIENT, SIGN_OF_X, SIGN_OF_Y, OUTPUT, OUTPUT_OF_RELU };

/* How a loop is masked: by a byte for each element, or for each row. */
enum { BY_ELEMENT = 1, BY_ROW };

/* What an innermost loop takes: rows of memory in the dtype of the arithmetic. */
typedef struct {
    const void *x, *dy, *y; /* y: the output of ReLU, or what is added to the output */
    const uint8_t *mask;    /* of the elements of one plane, of each column, or `by_row`; NULL if all count */
    void *out, *more, *first, *second;
    const void *k[5]; /* centre, factor and offset; factor and offset of what goes into ReLU */
    int64_t planes, S, stride, next; /* next: from rows of columns to those that are read after them */
    int rows, kind, by_row;
    int streams; /* whether results leave past the caches, or sums are of far memory */
} Rows;

typedef struct {
    void (*sums)(const Rows *);
    void (*column_sums)(const Rows *);
    void (*widen_sums)(void *, int64_t, double *);
    void (*write)(const Rows *);
    size_t size; /* of an element of the arithmetic */
    void (*widen)(const uint16_t *, int64_t, float *); /* of 16-bit activations; NULL for others */
    void (*narrow)(const float *, int64_t, uint16_t *);
    double least; /* outputs up to half the smallest number round to 0, which has no sign: a bit less than half */
} Loops;

/* From MOST_LANES - n on: the mask of the first n lanes of a vector. */
enum { MOST_LANES = 16 };
static const uint8_t ONES_AND_ZEROS[2 * MOST_LANES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* Ask for the cache lines that are AHEAD bytes after some values. The processor asks for lines by itself, but stops at
the end of each page. Lines of `far` memory come to the second cache only: few can be on their way to the first, and
stores past the caches take the same places. */
INLINE void ask_ahead(const void *values, int bytes, const int far)
{
    for (int i = 0; i < bytes; i += 64)
        if (far)
            __builtin_prefetch((const char *)values + AHEAD + i, 0, 2);
        else
            __builtin_prefetch((const char *)values + AHEAD + i);
}

static inline float as_float(uint32_t bits) { return (union { uint32_t bits; float f; }){bits}.f; }
static inline uint32_t as_bits(float f) { return (union { float f; uint32_t bits; }){f}.bits; }

static inline float from_bfloat16(uint16_t h) { return as_float((uint32_t)h << 16); }

static inline uint16_t to_bfloat16(float f) /* ties to even */
{
    const uint32_t u = as_bits(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

/* In integers, so that compilers make vectors of them, whatever the processor is. */
static inline float from_float16(uint16_t h)
{
    const uint32_t rest = h & 0x7fff, bias = 112u << 23;
    const uint32_t tiny = as_bits((float)(int32_t)rest * 0x1p-24f);
    uint32_t u = (rest << 13) + bias;
    u = rest >= 0x7c00 ? u + bias : u;
    u = rest < 0x0400 ? tiny : u;
    return as_float(u | (uint32_t)(h & 0x8000) << 16);
}

static inline uint16_t to_float16(float f) /* ties to even */
{
    const uint32_t u = as_bits(f), rest = u & 0x7fffffff;
    const uint32_t tiny = as_bits(as_float(rest) + 0.5f) - 0x3f000000;
    uint32_t h = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
    h = rest < 0x38800000 ? tiny : h;
    h = rest >= 0x47800000 ? 0x7c00 : h;
    h = rest > 0x7f800000 ? 0x7e00 : h;
    return h | (u >> 16 & 0x8000);
}

#define PASTE_(f, a, level) f##_##a##_##level
#define PASTE(f, a, level) PASTE_(f, a, level)

#define LEVEL columns /* one by one, where a row has fewer than a vector */
#define VECTOR 1
#define TARGET __attribute__((unused))
#include "_loops.h"
#define LEVEL baseline
#define VECTOR 16
#define TARGET
#include "_loops.h"

#ifdef __x86_64__
#define LEVEL avx2
#define VECTOR 32
#define TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#include "_loops.h"
#define LEVEL avx512
#define VECTOR 64
#ifdef __clang__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,fma")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,fma,prefer-vector-width=512")))
#endif
#include "_loops.h"
#endif

static const Loops *const LEVELS[] = { /* by dtype: float32, float64, float16, bfloat16 */
    loops_of_baseline,
#ifdef __x86_64__
    loops_of_avx2,
    loops_of_avx512,
#endif
};

static int num_levels(void)
{
#ifdef __x86_64__
#define HAS __builtin_cpu_supports
    __builtin_cpu_init();
    if (HAS("avx2") && HAS("fma") && HAS("bmi2"))
        return HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") ? 3 : 2;
#endif
    return 1;
}

static int level; /* of LEVELS, the one in use */
