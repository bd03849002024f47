/* Threads for a large activation: one for each share; they end with the pass.

How a sum is cut into parts depends on the sizes alone, so its value does not depend on the number of threads. */

#include <pthread.h>

enum {
    SHARE = 1 << 19, /* least elements for each thread */
    SPLIT_CHANNELS_FROM_ELEMENTS = 1 << 16, /* of a sample: then threads divide channels, not samples */
    MOST_PARTS = 64, /* of a sum over samples */
};

static int64_t parts_of(int64_t N, int64_t C, int64_t S)
{
    return C * S >= SPLIT_CHANNELS_FROM_ELEMENTS ? 1 : at_most(at_most(MOST_PARTS, at_least(N * C * S / SHARE, 1)), N);
}

/* A thread's share: of a sum, every `step`th part from `first` on; if `num` is not 0, an elementwise pass. */
typedef struct {
    Pass p;
    int64_t first, step;
    int num, failed, apart;
    pthread_t thread;
} Share;

static int sum_parts(Pass *p, int64_t first, int64_t step)
{
    double *const sums = p->sums;
    const int64_t N = p->n1;
    for (int64_t i = first; i < p->parts; i += step) {
        p->n0 = N * i / p->parts;
        p->n1 = N * (i + 1) / p->parts;
        p->sums = sums + 2 * i * p->C;
        for (int64_t c = p->c0; c < p->c1; c++)
            p->sums[c] = p->sums[p->C + c] = 0;
        if (add_sums(p))
            return -1;
        if (p->kind != MOMENTS) /* about the mean itself, not about the rounded mean */
            for (int64_t c = p->c0; c < p->c1; c++)
                p->sums[p->C + c] -= (p->mean[c] - rounded(p->loops, p->mean[c])) * p->sums[c];
    }
    return 0;
}

static void *do_share(void *of)
{
    Share *s = of;
    s->failed = s->num ? elementwise(&s->p, s->num) : sum_parts(&s->p, s->first, s->step);
    return NULL;
}

/* Run an elementwise pass with `num` coefficients, or sums if `num` is 0. Returns -1 if memory is exhausted. */
static int in_threads(const Pass *p, int num)
{
    const int64_t N = p->n1, C = p->C, worth = at_least(N * C * p->S / SHARE, 1);
    const int by_channel = C * p->S >= SPLIT_CHANNELS_FROM_ELEMENTS;
    const int64_t most = at_most(at_most(p->threads, worth), by_channel ? C : num ? N : p->parts);
    Share alone, *shares = most > 1 ? malloc(most * sizeof *shares) : NULL;
    const int64_t n = shares ? most : 1;
    int failed = 0;
    shares = shares ? shares : &alone;
    for (int64_t i = n; i-- > 0;) { /* the first one is for the calling thread */
        Share *s = shares + i;
        *s = (Share){.p = *p, .first = by_channel ? 0 : i, .step = by_channel ? 1 : n, .num = num};
        if (by_channel)
            s->p.c0 = C * i / n, s->p.c1 = C * (i + 1) / n;
        else if (num)
            s->p.n0 = N * i / n, s->p.n1 = N * (i + 1) / n;
        s->apart = i && !pthread_create(&s->thread, NULL, do_share, s);
        if (!s->apart)
            do_share(s);
    }
    for (int64_t i = 0; i < n; i++) {
        if (shares[i].apart)
            pthread_join(shares[i].thread, NULL);
        failed |= shares[i].failed;
    }
    if (shares != &alone)
        free(shares);
    for (int64_t i = 1; i < p->parts && !num; i++)
        for (int64_t c = 0; c < 2 * C; c++)
            p->sums[c] += p->sums[2 * i * C + c];
    return failed;
}
