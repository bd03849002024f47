/* The compiled part of the host kernels: loops over activations, and the steps between them.

Arrays come as addresses of dense memory; Python looks after their types, shapes and life. Nothing
here knows of NumPy or torch. `generic.py` says what each function computes, `_loops.h` has the
loops. The file needs GCC or Clang (vector types) and uses CPython's stable ABI: one build serves
all versions of Python from 3.10 on.

The build has -ffp-contract=off: each operation is rounded, so that equal moments leave a variance
of exactly 0, and the backward pass finds the sign of an output that the forward pass has found. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
_Static_assert(sizeof(void *) == 8, "addresses and sizes are 64-bit numbers here");

/* Planes of at least so many elements are long: they are handled without a tile. */
#define LONG 16
#define LONG_TO_SUM 64 /* a sum has its start and end to pay for, too */
#define BLOCK 512      /* values summed in the dtype of the arithmetic, and values widened at a time */
#define COLUMNS 2048   /* of a tile: the coefficients and sums of so many stay in the nearest caches */
#define BESIDE 512     /* up to so many columns, short samples stand side by side */
#define CHUNK 65536    /* elements in a row of a pass that goes backwards */
#define STREAMED (8 << 20) /* bytes of a result that leave the caches: their lines are not read first */
#define RUN 16         /* rows of a tile summed before the sums move to float64; more where so many */
#define LONG_RUN 64    /* sums follow that their errors average out */
#define FEW 8          /* values whose mean is the first centre */
#define FAR 4          /* standard deviations from centre to mean that make a second pass worthwhile */

/* Of a gradient: sums of x - mean; of dy; of dy where the output of ReLU, made again from x, or
read, is positive. */
enum { MOMENTS, GRADIENT, SIGN_OF_X, SIGN_OF_Y };

/* What an innermost loop takes: rows of memory in the dtype of the arithmetic. */
typedef struct {
    const void *x, *dy, *y; /* y: the output of ReLU, or what is added to the output */
    void *out, *more, *first, *second;
    const void *k[6]; /* centre, factor and offset; slope; factor and offset of what goes into ReLU */
    int64_t planes, S, stride;
    int rows, kind;
} Rows;

typedef struct {
    void (*sums)(const Rows *);
    void (*column_sums)(const Rows *);
    void (*widen_sums)(void *, int64_t, double *);
    void (*normalize)(const Rows *);
    void (*input_gradient)(const Rows *);
    size_t size;   /* of an element of the arithmetic */
    size_t stored; /* of an element of an activation */
    void (*widen)(const uint16_t *, int64_t, float *); /* NULL if these are the same */
    void (*narrow)(const float *, int64_t, uint16_t *);
} Loops;

/* A pass over the samples n0:n1 of the channels c0:c1. */
typedef struct {
    const Loops *loops;
    const void *x, *dy, *y;
    void *out, *more;
    const double *mean, *scale, *shift, *slope, *y_scale, *y_shift;
    double *sums;
    int64_t C, S, n0, n1, c0, c1;
    int kind, streams;
} Pass;

typedef struct {
    int64_t channels, samples, run; /* run: samples to sum before the sums move to float64 */
} Tile;

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static Tile tile_of(const Pass *p)
{
    const int64_t C = p->c1 - p->c0, N = p->n1 - p->n0;
    Tile tile = {at_most(at_least(COLUMNS / p->S, 1), C), 1, 0};
    if (tile.channels == p->C)
        tile.samples = at_most(at_least(BESIDE / (p->C * p->S), 1), at_least(N / 4, 1));
    tile.run = tile.samples * at_most(at_least(N / (RUN * tile.samples), RUN), LONG_RUN);
    return tile;
}

static inline float as_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t as_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

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

#define LEVEL baseline
#define VECTOR 16
#include "_widths.h"
#undef LEVEL
#undef VECTOR

#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define LEVEL avx2
#define VECTOR 32
#include "_widths.h"
#undef LEVEL
#undef VECTOR
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,fma,prefer-vector-width=512")
#endif
#define LEVEL avx512
#define VECTOR 64
#include "_widths.h"
#undef LEVEL
#undef VECTOR
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static const struct {
    const char *name;
    const Loops *loops; /* by dtype: float32, float64, float16, bfloat16 */
} LEVELS[] = {
    {"baseline", loops_of_baseline},
#if defined(__x86_64__)
    {"avx2", loops_of_avx2},
    {"avx512", loops_of_avx512},
#endif
};

static int num_levels(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
        return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 3
               : 2;
#else
    return 1;
#endif
}

static int level; /* of LEVELS, the one in use */

/* An element of an array of parameters or running statistics. */
static double get(const void *array, int64_t dtype, int64_t i)
{
    switch (dtype) {
    case 0: return ((const float *)array)[i];
    case 1: return ((const double *)array)[i];
    case 2: return from_float16(((const uint16_t *)array)[i]);
    default: return from_bfloat16(((const uint16_t *)array)[i]);
    }
}

static void put(void *array, int64_t dtype, int64_t i, double v)
{
    switch (dtype) {
    case 0: ((float *)array)[i] = (float)v; break;
    case 1: ((double *)array)[i] = v; break;
    case 2: ((uint16_t *)array)[i] = to_float16((float)v); break;
    default: ((uint16_t *)array)[i] = to_bfloat16((float)v);
    }
}

/* The passes over an activation. */

static void set(void *array, size_t size, int64_t i, double v)
{
    if (size == sizeof(float))
        ((float *)array)[i] = (float)v;
    else
        ((double *)array)[i] = v;
}

static double rounded(const Loops *loops, double v) { return loops->size == sizeof(float) ? (float)v : v; }

/* A result on its way past the caches, in whole cache lines: a line in two parts would be slow. */
typedef struct {
    char line[64], *next;
    size_t held; /* bytes in `line`, which belong before `next` */
} Stream;

static void flush(Stream *s)
{
    if (s->held)
        memcpy(s->next - s->held, s->line, s->held);
    s->held = 0;
}

#ifdef __SSE2__
static void stream(Stream *s, const char *from, size_t bytes, char *to)
{
    if (to != s->next)
        flush(s);
    s->next = to + bytes;
    while (bytes) {
        if (!s->held && !((uintptr_t)to & 63))
            for (; bytes >= 64; bytes -= 64, from += 64, to += 64)
                for (int i = 0; i < 64; i += 16)
                    _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        const size_t part = at_most(64 - ((uintptr_t)to & 63), bytes);
        memcpy(s->line + s->held, from, part);
        s->held += part;
        bytes -= part, from += part, to += part;
        if ((uintptr_t)to & 63)
            break;
        if (s->held == 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(to - 64 + i), _mm_loadu_si128((const __m128i *)(s->line + i)));
        else /* the memory begins within a line */
            memcpy(to - s->held, s->line, s->held);
        s->held = 0;
    }
}
#endif

/* Memory of a pass: coefficients of channels and of columns, sums of columns, and widened blocks. */
typedef struct {
    char *memory, *k[6], *columns[6], *buffers, *first;
    double *wide;
    int64_t size; /* columns of a tile; 0 for long planes */
    Tile tile;
    Stream streams[2]; /* of the results */
} Work;

enum { BUFFER = BLOCK + 64 };

static int start(Work *w, const Pass *p, int num, int64_t long_plane)
{
    const size_t size = p->loops->size;
    w->tile = tile_of(p);
    w->size = p->S >= long_plane ? 0 : w->tile.channels * p->S * w->tile.samples;
    const int64_t wide = 2 * w->size, line = 64 / size;
    const int64_t row = (at_least(p->C, 1) + line) / line * line, column = (w->size + line) / line * line;
    const int64_t buffers = p->loops->widen || p->streams ? at_least(6 * BUFFER, 12 * w->size) : 0;
    w->memory = malloc((wide + buffers) * sizeof(double) + (num * (row + column) + 2 * column) * size + 64);
    if (!w->memory)
        return -1;
    w->wide = (double *)(((uintptr_t)w->memory + 63) & ~(uintptr_t)63); /* a vector crosses no two lines */
    char *next = (char *)(w->wide + wide);
    for (int i = 0; i < num; i++, next += row * size)
        w->k[i] = next;
    for (int i = 0; i < num; i++, next += column * size)
        w->columns[i] = next;
    w->first = next;
    w->buffers = next + 2 * column * size;
    /* The rounding error of the mean goes into the offsets. */
    for (int64_t c = p->c0; c < p->c1; c++) {
        const double centre = rounded(p->loops, p->mean[c]), rest = p->mean[c] - centre;
        set(w->k[0], size, c, centre);
        if (num > 1) {
            set(w->k[1], size, c, p->scale[c]);
            set(w->k[2], size, c, p->shift[c] - rest * p->scale[c]);
        }
        if (num > 3)
            set(w->k[3], size, c, p->slope[c]);
        if (num > 4) {
            set(w->k[4], size, c, p->y_scale[c]);
            set(w->k[5], size, c, p->y_shift[c] - rest * p->y_scale[c]);
        }
    }
    return 0;
}

/* Copy the coefficients of the channels a:b to each of their columns. */
static void spread(const Work *w, const Pass *p, int num, int64_t a, int64_t b, Rows *r)
{
    const size_t size = p->loops->size;
    for (int i = 0; i < num; i++) {
        const char *values = w->k[i] + a * size;
        r->k[i] = values;
        if (p->S == 1 && w->tile.samples == 1)
            continue;
        r->k[i] = w->columns[i];
        int64_t j = 0;
        for (int64_t t = 0; t < w->tile.samples; t++)
            for (int64_t c = 0; c < b - a; c++)
                for (int64_t s = 0; s < p->S; s++, j++)
                    if (size == sizeof(float))
                        ((float *)w->columns[i])[j] = ((const float *)values)[c];
                    else
                        ((double *)w->columns[i])[j] = ((const double *)values)[c];
    }
}

static const void *widened(const Loops *loops, const void *array, int64_t at, int64_t n, void *buffer)
{
    if (!array)
        return NULL;
    if (!loops->widen)
        return (const char *)array + at * loops->size;
    loops->widen((const uint16_t *)array + at, n, buffer);
    return buffer;
}

/* The result of a block: from the buffer that holds it, if any, to its place. */
static void deliver(const Pass *p, Stream *s, void *values, int64_t n, char *buffer, void *out, int64_t at)
{
    const Loops *l = p->loops;
    char *place = (char *)out + at * l->stored;
    if (l->narrow) {
        l->narrow(values, n, (uint16_t *)(p->streams ? buffer : place));
        values = buffer;
    }
#ifdef __SSE2__
    if (p->streams)
        stream(s, values, n * l->stored, place);
#else
    (void)s;
#endif
}

/* A row of memory, in blocks if they are to be widened or streamed. */
static void run(const Pass *p, Work *w, Rows *r, void (*loop)(const Rows *), int64_t at, int64_t planes, int64_t S)
{
    const Loops *l = p->loops;
    const int blocks = l->widen || p->streams;
    const size_t buffer_size = BUFFER * sizeof(double);
    const void *k[6];
    memcpy(k, r->k, sizeof k);
    double *first = r->first, *second = r->second;
    for (int64_t c = 0; c < planes; c += r->planes)
        for (int64_t i = 0; i < S; i += r->S) {
            r->planes = planes;
            r->S = S;
            if (blocks && S <= BLOCK)
                r->planes = at_most(planes - c, BLOCK / S);
            else if (blocks) {
                r->planes = 1;
                r->S = S - i < BUFFER ? S - i : BLOCK;
            }
            const int64_t here = at + c * S + i, n = r->planes * r->S;
            char *buffer = w->buffers;
            for (int j = 0; j < 6; j++)
                r->k[j] = k[j] ? (const char *)k[j] + c * l->size : NULL;
            r->first = first + c;
            r->second = second + c;
            r->x = widened(l, p->x, here, n, buffer);
            r->dy = widened(l, p->dy, here, n, buffer + buffer_size);
            r->y = widened(l, p->y, here, n, buffer + 2 * buffer_size);
            r->out = blocks ? buffer + 3 * buffer_size : (char *)p->out + here * l->size;
            r->more = !p->more ? NULL : blocks ? buffer + 4 * buffer_size : (char *)p->more + here * l->size;
            loop(r);
            if (blocks && p->out)
                deliver(p, w->streams, r->out, n, buffer + 5 * buffer_size, p->out, here);
            if (blocks && p->more)
                deliver(p, w->streams + 1, r->more, n, buffer + 5 * buffer_size, p->more, here);
        }
    memcpy(r->k, k, sizeof k);
    r->first = first;
    r->second = second;
}

static int elementwise(Pass *p, void (*loop)(const Rows *), int num)
{
    const int64_t C = p->C, S = p->S;
    Work w = {0};
    Rows r = {.kind = p->kind};
#ifdef __SSE2__
    p->streams = (p->n1 - p->n0) * (p->c1 - p->c0) * S * p->loops->stored >= STREAMED;
#endif
    if (start(&w, p, num, LONG))
        return -1;
    /* The last samples come first: the pass before has left these in the caches. */
    const int64_t together = at_least(CHUNK / (C * S * w.tile.samples), 1) * w.tile.samples;
    for (int64_t end = p->n1, begin; end > p->n0; end = begin) {
        begin = at_least(end - together, p->n0);
        for (int64_t a = p->c0, b; a < p->c1; a = b) {
            b = w.size ? at_most(a + w.tile.channels, p->c1) : p->c1;
            if (w.size && (end == p->n1 || w.tile.channels < p->c1 - p->c0))
                spread(&w, p, num, a, b, &r);
            for (int i = 0; i < num && !w.size; i++)
                r.k[i] = w.k[i] + a * p->loops->size;
            for (int64_t n = begin, samples; n < end; n += samples) {
                samples = w.size ? at_most(end - n, w.tile.samples) : 1;
                run(p, &w, &r, loop, (n * C + a) * S, w.size ? samples * (b - a) * S : b - a, w.size ? 1 : S);
            }
        }
    }
    for (int i = 0; i < 2; i++)
        flush(w.streams + i);
#ifdef __SSE2__
    _mm_sfence(); /* what was streamed comes before what other threads are told */
#endif
    free(w.memory);
    return 0;
}

/* Add the sums of g and of g * d to the channels' sums, where d = x - centre. */
static int add_sums(const Pass *p)
{
    const Loops *l = p->loops;
    const int64_t C = p->C, S = p->S;
    const int num = p->kind == SIGN_OF_X ? 3 : 1;
    Work w;
    Rows r = {.kind = p->kind};
    if (start(&w, p, num, LONG_TO_SUM))
        return -1;
    if (S >= LONG_TO_SUM) {
        for (int i = 0; i < num; i++)
            r.k[i] = w.k[i] + p->c0 * l->size;
        r.first = p->sums + p->c0;
        r.second = p->sums + C + p->c0;
        for (int64_t n = p->n0; n < p->n1; n++)
            run(p, &w, &r, l->sums, (n * C + p->c0) * S, p->c1 - p->c0, S);
        free(w.memory);
        return 0;
    }
    r.first = w.first;
    r.second = w.first + w.size * l->size;
    memset(w.first, 0, 2 * w.size * l->size);
    memset(w.wide, 0, 2 * w.size * sizeof(double));
    for (int64_t a = p->c0; a < p->c1; a += w.tile.channels) {
        const int64_t b = at_most(a + w.tile.channels, p->c1), row = (b - a) * S;
        spread(&w, p, num, a, b, &r);
        for (int64_t begin = p->n0; begin < p->n1; begin += w.tile.run) {
            const int64_t end = at_most(begin + w.tile.run, p->n1);
            for (int64_t n = begin, samples; n < end; n += r.rows * samples) {
                samples = at_most(w.tile.samples, end - n);
                r.rows = n + 4 * samples <= end ? 4 : 1;
                r.planes = samples * row;
                r.stride = l->widen ? w.size : samples * C * S;
                const void **to[] = {&r.x, &r.dy, &r.y}, *from[] = {p->x, p->dy, p->y};
                for (int i = 0; i < 3; i++)
                    for (int u = r.rows; u-- > 0;)
                        *to[i] = widened(l, from[i], ((n + u * samples) * C + a) * S, r.planes,
                                         w.buffers + (4 * i + u) * w.size * sizeof(float));
                l->column_sums(&r);
            }
            l->widen_sums(w.first, 2 * w.size, w.wide);
        }
        int64_t j = 0;
        for (int64_t t = 0; t < w.tile.samples; t++)
            for (int64_t c = a; c < b; c++)
                for (int64_t i = 0; i < S; i++, j++) {
                    p->sums[c] += w.wide[j];
                    p->sums[C + c] += w.wide[w.size + j];
                }
        memset(w.wide, 0, 2 * w.size * sizeof(double));
    }
    free(w.memory);
    return 0;
}

/* The steps. */

enum { WEIGHT, COUNT, NUM_SCALARS }; /* after the 2C numbers of a forward message: see message.py */
enum { RIGHT, REFUSED, NOT_FINITE, ONE_VALUE }; /* states of a message: see generic.py */

static void pack(const double *mean, const double *var, double *packed, int64_t C, double weight, double count)
{
    for (int64_t c = 0; c < C; c++) {
        packed[c] = weight * mean[c];
        packed[C + c] = weight * (var[c] + mean[c] * mean[c]);
    }
    packed[2 * C + WEIGHT] = weight;
    packed[2 * C + COUNT] = count;
}

static int unpack(const double *summed, double *mean, double *var, double *total_count,
                  double *element_weight, int64_t C, double weight, double count)
{
    const double total_weight = summed[2 * C + WEIGHT], divisor = total_weight == 0 ? 1 : total_weight;
    int state = count <= 1 && summed[2 * C + COUNT] == 1 ? ONE_VALUE : RIGHT;
    for (int64_t c = 0; c < C; c++) {
        mean[c] = summed[c] / divisor;
        const double difference = summed[C + c] / divisor - mean[c] * mean[c];
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        if (!isfinite(summed[C + c]))
            state = NOT_FINITE;
    }
    *total_count = summed[2 * C + COUNT];
    *element_weight = weight / ((count > 1 ? count : 1) * divisor);
    return isnan(*total_count) ? REFUSED : state;
}

typedef struct {
    const void *weight, *bias; /* NULL for ones and zeros */
    int64_t dtype;
} Affine;

static void output_coefficients(const double *var, const Affine *a, double eps, int64_t C, double *scale,
                                double *shift)
{
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / sqrt(var[c] + eps);
        scale[c] = a->weight ? invstd * get(a->weight, a->dtype, c) : invstd;
        shift[c] = a->bias ? get(a->bias, a->dtype, c) : 0;
    }
}

/* Write the variance from the sums of all parts, and the mean in place of the centre. Returns how
many channels had a centre that was far from the mean. */
static int64_t finish_moments(const double *sums, double *mean, double *var, int64_t count, int64_t C,
                              int64_t parts)
{
    int64_t far = 0;
    for (int64_t c = 0; c < C; c++) {
        double first = 0, second = 0;
        for (int64_t p = 0; p < parts; p++) {
            first += sums[2 * p * C + c];
            second += sums[(2 * p + 1) * C + c];
        }
        first /= count;
        const double difference = second / count - first * first;
        mean[c] += first;
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        far += first * first > FAR * FAR * var[c];
    }
    return far;
}

/* Sums of every `step`th of the `parts` of the samples, from `first` on, of the channels c0:c1. */
static int sum_parts(Pass *p, int64_t N, int64_t parts, int64_t first, int64_t step)
{
    double *const sums = p->sums;
    for (int64_t i = first; i < parts; i += step) {
        p->n0 = N * i / parts;
        p->n1 = N * (i + 1) / parts;
        p->sums = sums + 2 * i * p->C;
        for (int64_t c = p->c0; c < p->c1; c++)
            p->sums[c] = p->sums[p->C + c] = 0;
        if (add_sums(p))
            return -1;
        if (p->kind != MOMENTS) /* about the mean itself, not about the rounded mean */
            for (int64_t c = p->c0; c < p->c1; c++)
                p->sums[p->C + c] -= (p->mean[c] - rounded(p->loops, p->mean[c])) * p->sums[c];
    }
    p->sums = sums;
    return 0;
}

/* Python's side. All arguments of a function are 64 bits wide: numbers and addresses. */

static int parse(PyObject *const *args, Py_ssize_t n, const char *kinds, void *fields)
{
    if (n != (Py_ssize_t)strlen(kinds)) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", (Py_ssize_t)strlen(kinds), n);
        return -1;
    }
    char *field = fields;
    for (Py_ssize_t i = 0; i < n; i++, field += 8) {
        if (kinds[i] == 'd') {
            const double v = PyFloat_AsDouble(args[i]);
            memcpy(field, &v, 8);
        } else {
            const int64_t v = PyLong_AsLongLong(args[i]);
            memcpy(field, &v, 8);
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

#define PARSE(kinds)                                                \
    const Loops *loops;                                             \
    (void)self;                                                     \
    if (parse(args, num, kinds, &a))                                \
        return NULL;                                                \
    loops = LEVELS[level].loops + (a.dtype & 3)

static PyObject *result(int64_t number)
{
    return number < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(number);
}

/* Moments of x about a centre: `mean` if `again`, else the mean of the first values. `sums` are
those of `sums`, or NULL: then they are made here, a second time if the centre was far. */
typedef struct {
    int64_t dtype;
    const void *x;
    int64_t N, C, S, parts;
    double *sums, *mean, *var;
    int64_t again;
    double *packed, weight, count;
} BeginForward;

/* What moments are taken about, rounded: the mean, or at first the mean of each channel's first values, which is
exact if these are equal. */
static void centre(const Pass *p, int64_t dtype, int64_t N, int64_t again, double *mean)
{
    const int64_t n = at_most(N * p->S, FEW);
    for (int64_t c = p->c0; c < p->c1; c++) {
        if (!again) {
            const double first = get(p->x, dtype, c * p->S);
            double rest = 0;
            for (int64_t i = 1; i < n; i++)
                rest += get(p->x, dtype, (i / p->S * p->C + c) * p->S + i % p->S) - first;
            mean[c] = first + rest / n;
        }
        mean[c] = rounded(p->loops, mean[c]);
    }
}

static int64_t begin_forward(const Loops *loops, const BeginForward *a)
{
    const int64_t C = a->C;
    double *memory = malloc((a->sums ? 2 : 2 + 2 * a->parts) * C * sizeof(double));
    if (!memory)
        return -1;
    double *mean = a->mean ? a->mean : memory, *var = a->var ? a->var : memory + C;
    double *sums = a->sums ? a->sums : memory + 2 * C;
    Pass p = {.loops = loops, .x = a->x, .mean = mean, .sums = sums, .C = C, .S = a->S, .c1 = C, .kind = MOMENTS};
    int64_t far = 0;
    for (int64_t again = a->again; again < 2; again++) {
        centre(&p, a->dtype, a->N, again, mean);
        if (!a->sums && sum_parts(&p, a->N, a->parts, 0, 1)) {
            free(memory);
            return -1;
        }
        far = finish_moments(sums, mean, var, a->N * a->S, C, a->parts);
        if (!far || a->sums)
            break;
    }
    if (a->packed)
        pack(mean, var, a->packed, C, a->weight, a->count);
    free(memory);
    return a->sums ? far : 0;
}

static PyObject *py_begin_forward(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    BeginForward a;
    int64_t far;
    PARSE("iiiiiiiiiiidd");
    Py_BEGIN_ALLOW_THREADS
    far = begin_forward(loops, &a);
    Py_END_ALLOW_THREADS
    return result(far);
}

/* What a pass reads beside the activations. */
typedef struct {
    const double *mean, *var;
    Affine affine;
    double eps;
} Statistics;

/* One thread's part of `begin_forward` or `begin_backward`. */
typedef struct {
    int64_t dtype, kind;
    const void *x, *dy, *y;
    Statistics s;
    int64_t N, C, S;
    double *sums;
    int64_t parts, first, step, c0, c1;
} Sums;

static int sums(const Loops *loops, const Sums *a)
{
    Pass p = {.loops = loops, .x = a->x, .dy = a->dy, .y = a->y, .mean = a->s.mean, .sums = a->sums,
              .C = a->C, .S = a->S, .c0 = a->c0, .c1 = a->c1, .kind = (int)a->kind};
    double *memory = malloc(2 * a->C * sizeof(double));
    if (!memory)
        return -1;
    if (a->kind == MOMENTS) {
        if (a->s.mean)
            memcpy(memory, a->s.mean, a->C * sizeof(double));
        centre(&p, a->dtype, a->N, a->s.mean != NULL, memory);
        p.mean = memory;
    } else if (a->kind == SIGN_OF_X) {
        p.scale = memory;
        p.shift = memory + a->C;
        output_coefficients(a->s.var, &a->s.affine, a->s.eps, a->C, memory, memory + a->C);
    }
    const int failed = sum_parts(&p, a->N, a->parts, a->first, a->step);
    free(memory);
    return failed;
}

static PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    Sums a;
    int failed;
    PARSE("iiiiiiiiiidiiiiiiiii");
    Py_BEGIN_ALLOW_THREADS
    failed = sums(loops, &a);
    Py_END_ALLOW_THREADS
    return result(failed);
}

/* Sums of dy and of dy * xhat, into the message and the gradients of weight and bias. `sums` are those of `sums`,
or NULL: then they are made here. */
typedef struct {
    Sums s;
    double *packed;
    void *dweight, *dbias; /* NULL where a parameter is */
} BeginBackward;

static int begin_backward(const Loops *loops, BeginBackward *a)
{
    const int64_t C = a->s.C, parts = a->s.parts, dtype = a->s.s.affine.dtype;
    double *memory = NULL;
    if (!a->s.sums) {
        memory = malloc(2 * C * parts * sizeof(double));
        a->s.sums = memory;
        if (!memory || sums(loops, &a->s)) {
            free(memory);
            return -1;
        }
    }
    for (int64_t c = 0; c < C; c++) {
        double first = 0, second = 0;
        for (int64_t p = 0; p < parts; p++) {
            first += a->s.sums[2 * p * C + c];
            second += a->s.sums[(2 * p + 1) * C + c];
        }
        second /= sqrt(a->s.s.var[c] + a->s.s.eps);
        a->packed[c] = first;
        a->packed[C + c] = second;
        if (a->dweight)
            put(a->dweight, dtype, c, second);
        if (a->dbias)
            put(a->dbias, dtype, c, first);
    }
    free(memory);
    return 0;
}

static PyObject *py_begin_backward(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    BeginBackward b;
    int failed;
    (void)self;
    if (parse(args, num, "iiiiiiiiiidiiiiiiiiiiii", &b))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = begin_backward(LEVELS[level].loops + (b.s.dtype & 3), &b);
    Py_END_ALLOW_THREADS
    return result(failed);
}

/* A thread's part of y. */
typedef struct {
    int64_t dtype, relu;
    const void *x, *residual;
    Statistics s;
    void *y;
    int64_t C, S, n0, n1, c0, c1;
} Normalize;

static int normalize(const Loops *loops, const Normalize *a)
{
    double *memory = malloc(2 * a->C * sizeof(double));
    if (!memory)
        return -1;
    Pass p = {.loops = loops, .x = a->x, .y = a->residual, .out = a->y, .mean = a->s.mean, .scale = memory,
              .shift = memory + a->C, .C = a->C, .S = a->S, .n0 = a->n0, .n1 = a->n1, .c0 = a->c0,
              .c1 = a->c1, .kind = a->relu ? SIGN_OF_X : GRADIENT};
    output_coefficients(a->s.var, &a->s.affine, a->s.eps, a->C, memory, memory + a->C);
    const int failed = elementwise(&p, loops->normalize, 3);
    free(memory);
    return failed;
}

static PyObject *py_normalize(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    Normalize a;
    int failed;
    PARSE("iiiiiiiiidiiiiiii");
    Py_BEGIN_ALLOW_THREADS
    failed = normalize(loops, &a);
    Py_END_ALLOW_THREADS
    return result(failed);
}

enum { UNBIASED_GLOBAL, UNBIASED_LOCAL }; /* else biased */

typedef struct {
    void *mean, *var; /* NULL if nothing is to be moved */
    int64_t dtype;
    double momentum; /* negative for 1/n at the n-th batch */
    int64_t convention, *num_batches; /* NULL if nothing is to be counted */
} Running;

static void move(const Running *r, const double *mean, const double *var, int64_t C, double total, double count)
{
    if (!(total > 0))
        return;
    double momentum = r->momentum, factor = 1;
    if (r->num_batches) {
        ++*r->num_batches;
        if (momentum < 0)
            momentum = 1.0 / (*r->num_batches > 1 ? *r->num_batches : 1);
    }
    if (r->convention == UNBIASED_GLOBAL)
        factor = total / (total > 2 ? total - 1 : 1);
    if (r->convention == UNBIASED_LOCAL)
        factor = count / (count > 2 ? count - 1 : 1);
    for (int64_t c = 0; c < C; c++) {
        const double old_mean = get(r->mean, r->dtype, c), old_var = get(r->var, r->dtype, c);
        put(r->mean, r->dtype, c, (1 - momentum) * old_mean + momentum * mean[c]);
        put(r->var, r->dtype, c, (1 - momentum) * old_var + momentum * (var[c] * factor));
    }
}

/* Writes the statistics of the message, moves the running statistics, and then a part of y: none where threads
are to follow. Returns the state of the message. */
typedef struct {
    Normalize n; /* mean and var are written */
    const double *summed;
    double weight, count, *total, *element_weight;
    Running running;
} FinishForward;

static int finish_forward(const Loops *loops, const FinishForward *a)
{
    double *mean = (double *)a->n.s.mean, *var = (double *)a->n.s.var;
    const int state = unpack(a->summed, mean, var, a->total, a->element_weight, a->n.C, a->weight, a->count);
    if (state != RIGHT)
        return state;
    if (a->running.mean)
        move(&a->running, mean, var, a->n.C, *a->total, a->count);
    return a->n.n0 < a->n.n1 ? normalize(loops, &a->n) : RIGHT;
}

static PyObject *py_finish_forward(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    FinishForward b;
    int state;
    (void)self;
    if (parse(args, num, "iiiiiiiiidiiiiiiiiddiiiiidii", &b))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    state = finish_forward(LEVELS[level].loops + (b.n.dtype & 3), &b);
    Py_END_ALLOW_THREADS
    return result(state);
}

/* A thread's part of dx; of the residual's gradient only where dy is not itself the gradient. */
typedef struct {
    int64_t dtype, kind;
    const void *x, *dy, *y;
    Statistics s;
    const double *summed;
    double element_weight;
    void *dx, *dresidual;
    int64_t C, S, n0, n1, c0, c1;
} FinishBackward;

static int finish_backward(const Loops *loops, const FinishBackward *a)
{
    const int64_t C = a->C;
    double *memory = malloc(5 * C * sizeof(double));
    if (!memory)
        return -1;
    double *y_scale = memory, *y_shift = y_scale + C, *slope = y_shift + C, *scale = slope + C;
    double *shift = scale + C;
    output_coefficients(a->s.var, &a->s.affine, a->s.eps, C, y_scale, y_shift);
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / sqrt(a->s.var[c] + a->s.eps), pull = -y_scale[c] * a->element_weight;
        slope[c] = y_scale[c];
        scale[c] = pull * invstd * a->summed[C + c];
        shift[c] = pull * a->summed[c];
    }
    Pass p = {.loops = loops, .x = a->x, .dy = a->dy, .y = a->y, .out = a->dx, .more = a->dresidual,
              .mean = a->s.mean, .scale = scale, .shift = shift, .slope = slope, .y_scale = y_scale,
              .y_shift = y_shift, .C = C, .S = a->S, .n0 = a->n0, .n1 = a->n1, .c0 = a->c0,
              .c1 = a->c1, .kind = (int)a->kind};
    const int failed = elementwise(&p, loops->input_gradient, a->kind == SIGN_OF_X ? 6 : 4);
    free(memory);
    return failed;
}

static PyObject *py_finish_backward(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    FinishBackward a;
    int failed;
    PARSE("iiiiiiiiiididiiiiiiii");
    Py_BEGIN_ALLOW_THREADS
    failed = finish_backward(loops, &a);
    Py_END_ALLOW_THREADS
    return result(failed);
}

static PyObject *py_use_level(PyObject *self, PyObject *number)
{
    (void)self;
    const long wanted = PyLong_AsLong(number);
    if (wanted < 0 || wanted >= num_levels())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "`level` must be below %d", num_levels());
    level = (int)wanted;
    Py_RETURN_NONE;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(begin_forward),
    FUNCTION(finish_forward),
    FUNCTION(begin_backward),
    FUNCTION(finish_backward),
    FUNCTION(normalize),
    FUNCTION(sums),
    {"use_level", py_use_level, METH_O, "Use these instructions, a place in `levels`, in all threads: for tests."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    const int count = num_levels();
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(LEVELS[i].name));
    level = count - 1;
    if (!names || PyModule_AddObjectRef(module, "levels", names))
        return -1;
    Py_DECREF(names);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled part of the host kernels.", 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
