/* All loops of one set of instructions, whose name is LEVEL. */

#define A float
#define NAME(f) PASTE(f, float, LEVEL)
#include "_loops.h"
#undef A
#undef NAME
#define A double
#define NAME(f) PASTE(f, double, LEVEL)
#include "_loops.h"
#undef A
#undef NAME

#define CONVERSION(dtype)                                                                               \
    static void PASTE(widen, dtype, LEVEL)(const uint16_t *restrict p, int64_t n, float *restrict wide)  \
    {                                                                                                   \
        for (int64_t i = 0; i < n; i++)                                                                 \
            wide[i] = from_##dtype(p[i]);                                                               \
    }                                                                                                   \
    static void PASTE(narrow, dtype, LEVEL)(const float *restrict wide, int64_t n, uint16_t *restrict p) \
    {                                                                                                   \
        for (int64_t i = 0; i < n; i++)                                                                 \
            p[i] = to_##dtype(wide[i]);                                                                 \
    }
CONVERSION(float16)
CONVERSION(bfloat16)
#undef CONVERSION

#define LOOPS(A) \
    PASTE(sums, A, LEVEL), PASTE(column_sums, A, LEVEL), PASTE(widen_sums, A, LEVEL), PASTE(normalize, A, LEVEL), \
        PASTE(input_gradient, A, LEVEL), sizeof(A)
static const Loops PASTE(loops, of, LEVEL)[] = {
    {LOOPS(float), sizeof(float), NULL, NULL},
    {LOOPS(double), sizeof(double), NULL, NULL},
    {LOOPS(float), 2, PASTE(widen, float16, LEVEL), PASTE(narrow, float16, LEVEL)},
    {LOOPS(float), 2, PASTE(widen, bfloat16, LEVEL), PASTE(narrow, bfloat16, LEVEL)},
};
#undef LOOPS
