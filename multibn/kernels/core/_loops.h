/* The innermost loops, for one dtype of arithmetic and one set of instructions.

_levels.h includes this file once for each set of instructions, and defines LEVEL, the set's name, and VECTOR, the
bytes of a vector register; 1 stands for vectors of one element. Then this file includes itself once for each dtype A, where NAME(f) is the name of
function f.

A loop takes `planes` planes of S elements, one after the other in memory, and coefficients: one of
each kind for a plane. The columns of a tile are planes of one element. */

#ifndef A
#define NAME(f) PASTE(f, A, LEVEL)
#define A float
#include "_loops.h"
#undef A
#define A double
#include "_loops.h"
#undef A
#undef NAME

#if VECTOR > 1
#define CONVERSION(dtype)                                                                               \
    static TARGET void PASTE(widen, dtype, LEVEL)(const uint16_t *restrict p, int64_t n, float *restrict wide)  \
    {                                                                                                   \
        for (int64_t i = 0; i < n; i++)                                                                 \
            wide[i] = from_##dtype(p[i]);                                                               \
    }                                                                                                   \
    static TARGET void PASTE(narrow, dtype, LEVEL)(const float *restrict wide, int64_t n, uint16_t *restrict p) \
    {                                                                                                   \
        for (int64_t i = 0; i < n; i++)                                                                 \
            p[i] = to_##dtype(wide[i]);                                                                 \
    }
CONVERSION(float16)
CONVERSION(bfloat16)
#undef CONVERSION

#define LOOPS(A) \
    PASTE(sums, A, LEVEL), PASTE(column_sums, A, LEVEL), PASTE(widen_sums, A, LEVEL), PASTE(write, A, LEVEL), sizeof(A)
static const Loops PASTE(loops, of, LEVEL)[] = {
    {LOOPS(float), NULL, NULL, 0},
    {LOOPS(double), NULL, NULL, 0},
    {LOOPS(float), PASTE(widen, float16, LEVEL), PASTE(narrow, float16, LEVEL), 0x1.fffffep-26},
    {LOOPS(float), PASTE(widen, bfloat16, LEVEL), PASTE(narrow, bfloat16, LEVEL), 0x1.fffffep-135},
};
#undef LOOPS
#endif
#undef LEVEL
#undef VECTOR
#undef TARGET

#else /* of the dtype A */

#define LANES (VECTOR > 1 ? VECTOR / (int)sizeof(A) : 1)
typedef A NAME(vector) __attribute__((vector_size(LANES * sizeof(A)), aligned(sizeof(A)), may_alias));
typedef __typeof__((NAME(vector)){0} > (NAME(vector)){0}) NAME(mask);
typedef int8_t NAME(bytes) __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE TARGET NAME(vector) NAME(load)(const A *p) { return *(const NAME(vector) *)p; }

/* All bits of a lane where the byte of a mask is true: to be and-ed, so that NaN leaves nothing. */
INLINE TARGET NAME(mask) NAME(load_mask)(const uint8_t *p)
{
    return __builtin_convertvector(*(const NAME(bytes) *)p != 0, NAME(mask));
}

INLINE TARGET NAME(vector) NAME(select)(NAME(mask) m, NAME(vector) v) { return (NAME(vector))((NAME(mask))v & m); }

INLINE TARGET NAME(vector) NAME(join)(NAME(mask) m, NAME(vector) v, NAME(vector) others)
{
    return (NAME(vector))(((NAME(mask))v & m) | ((NAME(mask))others & ~m));
}

INLINE TARGET double NAME(total)(NAME(vector) v)
{
    A values[LANES];
    memcpy(values, &v, sizeof v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++)
            values[k] += values[k + half];
    return values[0];
}

/* LANES elements of g: of d, which is x - centre, or of the gradient of what goes into ReLU. */
#define G(d, at, factor, offset)                                                                   \
    (kind == MOMENTS     ? (d)                                                                     \
     : kind == SIGN_OF_X ? NAME(select)((d) * (factor) + (offset) > 0, NAME(load)(dy + (at)))      \
     : kind == SIGN_OF_Y ? NAME(select)(NAME(load)(y + (at)) > 0, NAME(load)(dy + (at)))           \
                         : NAME(load)(dy + (at)))

/* Add the sums of g and g * d of each plane. Some values in a row, at least LANES, are summed in A. */
INLINE TARGET void NAME(sums_of)(const Rows *r, const int kind, const int masked)
{
    typedef NAME(vector) V;
    typedef NAME(mask) M;
    const M all = (V){0} == 0;
    for (int64_t c = 0, from = 0; c < r->planes; c++)
        for (int64_t begin = 0, n; begin < r->S; begin += n, from += n) {
            const A *x = (const A *)r->x + from, *dy = kind == MOMENTS ? NULL : (const A *)r->dy + from;
            const A *y = kind == SIGN_OF_Y ? (const A *)r->y + from : NULL, centre = ((const A *)r->k[0])[c];
            const A factor = kind == SIGN_OF_X ? ((const A *)r->k[1])[c] : 0;
            const A offset = kind == SIGN_OF_X ? ((const A *)r->k[2])[c] : 0;
            const uint8_t *mask = masked ? r->mask + begin : NULL;
            V firsts[4] = {{0}}, seconds[4] = {{0}};
            int64_t i = 0;
            n = r->S - begin < BLOCK + LANES ? r->S - begin : BLOCK;
#define ADD(u, at, counts)                                                              \
    do {                                                                                \
        const V d = NAME(load)(x + (at)) - centre;                                      \
        const M m = masked ? (counts) & NAME(load_mask)(mask + (at)) : (counts);        \
        const V g = NAME(select)(m, G(d, at, factor, offset));                          \
        firsts[u] += g;                                                                 \
        seconds[u] += g * NAME(select)(m, d);                                           \
    } while (0)
            for (; i + 4 * LANES <= n; i += 4 * LANES) {
                ask_ahead(x + i, 4 * VECTOR, r->streams);
                if (kind != MOMENTS)
                    ask_ahead(dy + i, 4 * VECTOR, r->streams);
                if (kind == SIGN_OF_Y)
                    ask_ahead(y + i, 4 * VECTOR, r->streams);
                for (int u = 0; u < 4; u++)
                    ADD(u, i + u * LANES, all);
            }
            for (; i + LANES <= n; i += LANES)
                ADD(0, i, all);
            if (i < n) { /* the last LANES values, without those that are in the sums already */
                M rest;
                for (int k = 0; k < LANES; k++)
                    rest[k] = k < LANES - (n - i) ? 0 : -1;
                ADD(1, n - LANES, rest);
            }
#undef ADD
            ((double *)r->first)[c] += NAME(total)((firsts[0] + firsts[1]) + (firsts[2] + firsts[3]));
            ((double *)r->second)[c] += NAME(total)((seconds[0] + seconds[1]) + (seconds[2] + seconds[3]));
        }
}

#define EACH_KIND(CODE)                     \
    switch (r->kind) {                      \
    case MOMENTS: CODE(MOMENTS); break;     \
    case GRADIENT: CODE(GRADIENT); break;   \
    case SIGN_OF_X: CODE(SIGN_OF_X); break; \
    default: CODE(SIGN_OF_Y);               \
    }

/* Sums of long planes, in float64. */
static TARGET void NAME(sums)(const Rows *r)
{
#define CODE(kind) r->mask ? NAME(sums_of)(r, kind, 1) : NAME(sums_of)(r, kind, 0)
    EACH_KIND(CODE)
#undef CODE
}

INLINE TARGET void NAME(column_sums_of)(const Rows *r, const int rows, const int kind, const int masked)
{
    typedef NAME(vector) V;
    const int64_t n = r->planes, s = r->stride, next = r->next;
    const A *x = r->x, *dy = r->dy, *y = r->y, *centre = r->k[0], *factor = r->k[1], *offset = r->k[2];
    A *first = r->first, *second = r->second;
    NAME(mask) counts = (V){0} == 0;
    for (int64_t j = 0; j < n; j += LANES) {
        if (j + LANES > n) { /* the last columns, without those that are in the sums already */
            for (int k = 0; k < LANES; k++)
                counts[k] = k < j + LANES - n ? 0 : -1;
            j = n - LANES;
        }
        V g[4], gd[4];
        for (int u = 0; u < rows; u++) {
            const int64_t i = u * s + j;
            __builtin_prefetch(x + i + next, 0, 2);
            if (kind != MOMENTS)
                __builtin_prefetch(dy + i + next, 0, 2);
            if (kind == SIGN_OF_Y)
                __builtin_prefetch(y + i + next, 0, 2);
            const V d = NAME(load)(x + i) - NAME(load)(centre + j);
            const NAME(mask) m = masked ? counts & NAME(load_mask)(r->mask + u * n + j) : counts;
            g[u] = NAME(select)(m, G(d, i, NAME(load)(factor + j), NAME(load)(offset + j)));
            gd[u] = g[u] * NAME(select)(m, d);
        }
        if (rows == 4) {
            g[0] = (g[0] + g[1]) + (g[2] + g[3]);
            gd[0] = (gd[0] + gd[1]) + (gd[2] + gd[3]);
        }
        *(V *)(first + j) += g[0];
        *(V *)(second + j) += gd[0];
    }
}

/* Sums of the columns of four rows, or of one, in A. */
static TARGET void NAME(column_sums)(const Rows *r)
{
    if (r->planes < LANES) {
        PASTE(column_sums, A, columns)(r);
        return;
    }
#define CODE(kind)                                                                                  \
    if (r->rows == 4)                                                                               \
        r->mask ? NAME(column_sums_of)(r, 4, kind, 1) : NAME(column_sums_of)(r, 4, kind, 0);        \
    else                                                                                            \
        r->mask ? NAME(column_sums_of)(r, 1, kind, 1) : NAME(column_sums_of)(r, 1, kind, 0)
    EACH_KIND(CODE)
#undef CODE
}

static TARGET void NAME(widen_sums)(void *sums, int64_t n, double *restrict wide)
{
    A *restrict values = sums;
    for (int64_t j = 0; j < n; j++) {
        wide[j] += values[j];
        values[j] = 0;
    }
}

INLINE TARGET void NAME(store)(A *p, NAME(vector) v, const int streams)
{
#if defined(__SSE2__) && VECTOR > 1
    if (streams && !((uintptr_t)p % VECTOR)) {
#if VECTOR == 64
        _mm512_stream_si512((void *)p, (__m512i)v);
#elif VECTOR == 32
        _mm256_stream_si256((void *)p, (__m256i)v);
#else
        _mm_stream_si128((void *)p, (__m128i)v);
#endif
        return;
    }
#endif
    *(NAME(vector) *)p = v;
}

/* The output, or the gradient of x; with `more`, after an addition, or with the gradient before ReLU.

LANES elements at a time, of long planes, whose coefficients stay in registers, or of adjacent rows of the
columns of a tile. If `out` is to leave past the caches, the second vector begins with one of its cache lines. A vector
at the end of a plane or row goes on in the next one: with the coefficients of both planes, or with those of the first
columns, which stand again after the last ones. The last vector, and with a mask the last one of each plane, overlaps
the one before, and writes the same there. Between two vectors of a long plane, the only question is whether the plane
has ended: more questions take longer than the arithmetic. */
INLINE TARGET void NAME(write_of)(const Rows r, const int kind, const int more, const int masked, const int columns,
                                  const int streams)
{
    typedef NAME(vector) V;
    const A *x = r.x, *dy = r.dy, *y = r.y;
    const int64_t n = columns ? r.planes : r.S, planes = columns ? r.rows : r.planes;
    int64_t step = streams && n > LANES ? LANES - (uintptr_t)r.out % VECTOR / sizeof(A) : LANES;
#define K(j) (columns ? NAME(load)((const A *)r.k[j] + m) : k[j])
#define MASKED(v) \
    (masked == BY_ROW ? NAME(select)(whole, v) : masked ? NAME(select)(NAME(load_mask)(r.mask + m), v) : (v))
    for (int64_t c = 0, i = 0, end = n; c < planes; c++, end += n) {
        const NAME(mask) whole = (V){0} + (A)(masked == BY_ROW && r.mask[c]) > 0;
        V k[5] = {{0}};
        for (int j = 0; j < 5 && !columns; j++)
            if (r.k[j])
                k[j] += ((const A *)r.k[j])[c];
        while (i < end) {
            if (i + LANES > end && (masked || c + 1 == planes))
                i = end - LANES;
            else if (i + LANES > end && !columns) {
                const NAME(mask) own = NAME(load_mask)(ONES_AND_ZEROS + MOST_LANES - (end - i));
                for (int j = 0; j < 5; j++)
                    if (r.k[j])
                        k[j] = NAME(join)(own, k[j], (V){0} + ((const A *)r.k[j])[c + 1]);
            }
            do {
                const int64_t m = i + n - end;
                ask_ahead(x + i, VECTOR, streams);
                if (kind < OUTPUT)
                    ask_ahead(dy + i, VECTOR, streams);
                if (kind == SIGN_OF_Y || (kind >= OUTPUT && more))
                    ask_ahead(y + i, VECTOR, streams);
                const V d = NAME(load)(x + i) - K(0);
                V v = d * K(1);
                if (kind < OUTPUT) {
                    const V g = G(d, i, K(3), K(4));
                    v += g * K(3) + K(2);
                    if (more)
                        NAME(store)((A *)r.more + i, MASKED(g), streams);
                } else {
                    v += K(2);
                    if (more)
                        v += NAME(load)(y + i);
                    if (kind == OUTPUT_OF_RELU)
                        v = NAME(select)(~(v < 0), v); /* NaN stays */
                }
                NAME(store)((A *)r.out + i, MASKED(v), streams);
                i += step;
                step = LANES;
            } while (!columns && i + LANES <= end);
        }
    }
#undef K
#undef MASKED
}

#undef G

#define MASKS(streams, ...)                                                                                        \
    r->S == 1 ? !r->mask    ? NAME(write_of)(*r, __VA_ARGS__, 0, 1, streams)                                       \
                : r->by_row ? NAME(write_of)(*r, __VA_ARGS__, BY_ROW, 1, streams)                                  \
                            : NAME(write_of)(*r, __VA_ARGS__, BY_ELEMENT, 1, streams)                              \
    : r->mask ? NAME(write_of)(*r, __VA_ARGS__, BY_ELEMENT, 0, streams)                                            \
              : NAME(write_of)(*r, __VA_ARGS__, 0, 0, streams)
#define CODE(...) (r->streams ? (MASKS(1, __VA_ARGS__)) : (MASKS(0, __VA_ARGS__)))

static TARGET void NAME(write)(const Rows *r)
{
    if (r->S == 1 && r->planes < LANES)
        PASTE(write, A, columns)(r);
    else if (r->kind == GRADIENT)
        CODE(GRADIENT, 0);
    else if (r->kind == SIGN_OF_X)
        CODE(SIGN_OF_X, 0);
    else if (r->kind == SIGN_OF_Y)
        r->more ? CODE(SIGN_OF_Y, 1) : CODE(SIGN_OF_Y, 0);
    else if (r->kind == OUTPUT)
        r->y ? CODE(OUTPUT, 1) : CODE(OUTPUT, 0);
    else
        r->y ? CODE(OUTPUT_OF_RELU, 1) : CODE(OUTPUT_OF_RELU, 0);
}

#undef CODE
#undef MASKS
#undef EACH_KIND
#undef LANES

#endif
