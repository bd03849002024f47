/* The innermost loops, for one dtype of arithmetic and one set of instructions.

_core.c includes this file once for each pair of them and defines before:
    A         the dtype             NAME(f)  the name of function f
    VECTOR    bytes of a vector register

A loop takes `planes` planes of S elements, one after the other in memory, and coefficients: one of
each kind for a plane. The columns of a tile are planes of one element. */

#define LANES (VECTOR / (int)sizeof(A))
typedef A NAME(vector) __attribute__((vector_size(VECTOR), aligned(sizeof(A)), may_alias));
typedef __typeof__((NAME(vector)){0} > (NAME(vector)){0}) NAME(mask);

INLINE NAME(vector) NAME(load)(const A *p) { return *(const NAME(vector) *)p; }

INLINE double NAME(total)(NAME(vector) v)
{
    A values[LANES];
    memcpy(values, &v, sizeof v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++)
            values[k] += values[k + half];
    return values[0];
}

/* Add the sums of g and g * d over n values in a row, n at least LANES; d is x - centre, and g is d
or the gradient of what goes into ReLU. */
INLINE void NAME(add_values)(const A *x, const A *dy, const A *y, int64_t n, A centre, A factor, A offset,
                             const int kind, double *first, double *second)
{
    typedef NAME(vector) V;
    typedef NAME(mask) M;
    V firsts[4] = {{0}}, seconds[4] = {{0}};
#define ADD(u, at, mask)                                            \
    do {                                                            \
        V d = NAME(load)(x + (at)) - centre, g = d;                 \
        if (kind != MOMENTS)                                        \
            g = NAME(load)(dy + (at));                              \
        if (kind == SIGN_OF_X)                                      \
            g = (V)((M)g & (d * factor + offset > 0));              \
        if (kind == SIGN_OF_Y)                                      \
            g = (V)((M)g & (NAME(load)(y + (at)) > 0));             \
        d = (V)((M)d & (mask));                                     \
        g = (V)((M)g & (mask));                                     \
        firsts[u] += g;                                             \
        seconds[u] += g * d;                                        \
    } while (0)
    const M all = firsts[0] == 0;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        ADD(0, i, all);
        ADD(1, i + LANES, all);
        ADD(2, i + 2 * LANES, all);
        ADD(3, i + 3 * LANES, all);
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
    *first += NAME(total)((firsts[0] + firsts[1]) + (firsts[2] + firsts[3]));
    *second += NAME(total)((seconds[0] + seconds[1]) + (seconds[2] + seconds[3]));
}

INLINE void NAME(sums_of)(const Rows *r, const int kind)
{
    const A *x = r->x, *dy = r->dy, *y = r->y, *centre = r->k[0], *factor = r->k[1], *offset = r->k[2];
    for (int64_t c = 0, at = 0; c < r->planes; c++)
        for (int64_t i = 0, n; i < r->S; i += n, at += n) {
            n = r->S - i < BLOCK + LANES ? r->S - i : BLOCK;
            NAME(add_values)(x + at, kind == MOMENTS ? NULL : dy + at, kind == SIGN_OF_Y ? y + at : NULL, n,
                             centre[c], kind == SIGN_OF_X ? factor[c] : 0, kind == SIGN_OF_X ? offset[c] : 0,
                             kind, (double *)r->first + c, (double *)r->second + c);
        }
}

/* Sums of long planes, in float64. */
static void NAME(sums)(const Rows *r)
{
    switch (r->kind) {
    case MOMENTS: NAME(sums_of)(r, MOMENTS); break;
    case GRADIENT: NAME(sums_of)(r, GRADIENT); break;
    case SIGN_OF_X: NAME(sums_of)(r, SIGN_OF_X); break;
    default: NAME(sums_of)(r, SIGN_OF_Y);
    }
}

INLINE A NAME(gradient)(A d, A dy, A y, A factor, A offset, const int kind)
{
    if (kind == MOMENTS)
        return d;
    if (kind == SIGN_OF_X)
        y = d * factor + offset;
    return kind == GRADIENT || y > 0 ? dy : 0;
}

INLINE void NAME(column_sums_of)(const Rows *r, const int rows, const int kind)
{
    const int64_t n = r->planes, s = r->stride;
    const A *x0 = r->x, *x1 = x0 + s, *x2 = x1 + s, *x3 = x2 + s;
    const A *dy0 = kind == MOMENTS ? x0 : r->dy, *dy1 = dy0 + s, *dy2 = dy1 + s, *dy3 = dy2 + s;
    const A *y0 = kind == SIGN_OF_Y ? r->y : x0, *y1 = y0 + s, *y2 = y1 + s, *y3 = y2 + s;
    const A *centre = r->k[0], *factor = r->k[1], *offset = r->k[2];
    A *first = r->first, *second = r->second;
#define TERM(u)                                                                                    \
    const A d##u = x##u[j] - centre[j];                                                            \
    const A g##u = NAME(gradient)(d##u, kind == MOMENTS ? 0 : dy##u[j], kind == SIGN_OF_Y ? y##u[j] : 0, \
                                  kind == SIGN_OF_X ? factor[j] : 0, kind == SIGN_OF_X ? offset[j] : 0, kind)
    if (rows == 4) {
        INDEPENDENT
        for (int64_t j = 0; j < n; j++) {
            TERM(0);
            TERM(1);
            TERM(2);
            TERM(3);
            first[j] += (g0 + g1) + (g2 + g3);
            second[j] += (g0 * d0 + g1 * d1) + (g2 * d2 + g3 * d3);
        }
    } else {
        INDEPENDENT
        for (int64_t j = 0; j < n; j++) {
            TERM(0);
            first[j] += g0;
            second[j] += g0 * d0;
        }
    }
#undef TERM
}

/* Sums of the columns of four rows, or of one, in A. */
static void NAME(column_sums)(const Rows *r)
{
#define CASE(kind)                                 \
    if (r->rows == 4)                              \
        NAME(column_sums_of)(r, 4, kind);          \
    else                                           \
        NAME(column_sums_of)(r, 1, kind);          \
    break
    switch (r->kind) {
    case MOMENTS: CASE(MOMENTS);
    case GRADIENT: CASE(GRADIENT);
    case SIGN_OF_X: CASE(SIGN_OF_X);
    default: CASE(SIGN_OF_Y);
    }
#undef CASE
}

static void NAME(widen_sums)(void *sums, int64_t n, double *restrict wide)
{
    A *restrict values = sums;
    for (int64_t j = 0; j < n; j++) {
        wide[j] += values[j];
        values[j] = 0;
    }
}

/* A loop over the columns of a tile, and one over long planes, which has its coefficients in registers. */
#define EACH(CODE)                                                           \
    if (r->S == 1) {                                                         \
        INDEPENDENT                                                          \
        for (int64_t i = 0; i < r->planes; i++)                              \
            CODE(i)                                                          \
    } else                                                                   \
        for (int64_t c = 0; c < r->planes; c++) {                            \
            const int64_t end = (c + 1) * r->S;                              \
            INDEPENDENT                                                      \
            for (int64_t i = c * r->S; i < end; i++)                         \
                CODE(c)                                                      \
        }

INLINE void NAME(normalize_of)(const Rows *r, const int adds, const int relu)
{
    const A *x = r->x, *residual = r->y, *centre = r->k[0], *factor = r->k[1], *offset = r->k[2];
    A *y = r->out;
#define CODE(c)                                                 \
    {                                                           \
        A v = (x[i] - centre[c]) * factor[c] + offset[c];       \
        if (adds)                                               \
            v += residual[i];                                   \
        y[i] = relu && v < 0 ? 0 : v; /* NaN stays */           \
    }
    EACH(CODE)
#undef CODE
}

static void NAME(normalize)(const Rows *r)
{
    if (r->y)
        r->kind == GRADIENT ? NAME(normalize_of)(r, 1, 0) : NAME(normalize_of)(r, 1, 1);
    else
        r->kind == GRADIENT ? NAME(normalize_of)(r, 0, 0) : NAME(normalize_of)(r, 0, 1);
}

INLINE void NAME(input_gradient_of)(const Rows *r, const int kind, const int writes)
{
    const A *x = r->x, *dy = r->dy, *y = r->y, *centre = r->k[0], *factor = r->k[1], *offset = r->k[2];
    const A *slope = r->k[3], *y_factor = r->k[4], *y_offset = r->k[5];
    A *dx = r->out, *dresidual = r->more;
#define CODE(c)                                                                                          \
    {                                                                                                    \
        const A d = x[i] - centre[c];                                                                    \
        const A g = NAME(gradient)(d, dy[i], kind == SIGN_OF_Y ? y[i] : 0,                               \
                                   kind == SIGN_OF_X ? y_factor[c] : 0, kind == SIGN_OF_X ? y_offset[c] : 0, kind); \
        dx[i] = d * factor[c] + (g * slope[c] + offset[c]);                                              \
        if (writes)                                                                                      \
            dresidual[i] = g;                                                                            \
    }
    EACH(CODE)
#undef CODE
}

static void NAME(input_gradient)(const Rows *r)
{
    if (r->kind == GRADIENT)
        NAME(input_gradient_of)(r, GRADIENT, 0);
    else if (r->kind == SIGN_OF_X)
        NAME(input_gradient_of)(r, SIGN_OF_X, 0);
    else
        r->more ? NAME(input_gradient_of)(r, SIGN_OF_Y, 1) : NAME(input_gradient_of)(r, SIGN_OF_Y, 0);
}

#undef EACH
#undef LANES
