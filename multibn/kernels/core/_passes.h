/* The passes over an activation: dense memory in the order (N, C, S), of which N and S are reduced.

The plane of channel c of sample n is the S elements from (n * C + c) * S on; S is 1 in channels-last memory. In a long
plane the channel's coefficients stay in registers. Short planes are handled in tiles: the columns of a tile are the
planes of several channels side by side, and of several samples where a sample is short too; each column has its own
copy of the coefficients.

A pass over a large activation waits for memory. So the loops ask for cache lines a page ahead of their turn, and a
large result uses non-temporal stores, since other stores would first read its cache lines. 16-bit results do not.

A few dozen consecutive values are summed in the dtype of the arithmetic, and these sums are added up in float64. 16-bit
values are widened block by block: no pass has a copy of an activation. */

/* A pass over the samples n0:n1 of the channels c0:c1. */
typedef struct {
    const Loops *loops;
    const void *x, *dy, *y;
    const uint8_t *mask; /* a byte for each element of a plane, the same for all channels; or NULL */
    void *out, *more;
    const double *mean, *scale, *shift, *y_scale, *y_shift;
    double *sums;
    int64_t C, S, n0, n1, c0, c1, threads, parts; /* parts: of a sum */
    int kind;
} Pass;

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static void set(void *array, size_t size, int64_t i, double v)
{
    if (size == sizeof(float))
        ((float *)array)[i] = (float)v;
    else
        ((double *)array)[i] = v;
}

static double rounded(const Loops *loops, double v) { return loops->size == sizeof(float) ? (float)v : v; }

/* Write the first `num` coefficients of the channels c0:c1. The rounding error of the mean goes into the offsets. */
static void set_coefficients(const Pass *p, int num, char *const *k)
{
    const size_t size = p->loops->size;
    for (int64_t c = p->c0; c < p->c1; c++) {
        const double centre = rounded(p->loops, p->mean[c]), rest = p->mean[c] - centre;
        set(k[0], size, c, centre);
        if (num > 1) {
            set(k[1], size, c, p->scale[c]);
            const double shift = p->shift[c] - rest * p->scale[c];
            set(k[2], size, c, p->sums ? rounded(p->loops, shift) - p->loops->least : shift);
        }
        if (num > 3)
            set(k[3], size, c, p->y_scale[c]);
        if (num > 4)
            set(k[4], size, c, rounded(p->loops, p->y_shift[c] - rest * p->y_scale[c]) - p->loops->least);
    }
}

/* Memory of a pass: coefficients of channels and of columns, sums of columns, and widened blocks. */
typedef struct {
    char *memory, *k[5], *columns[5], *buffers, *first;
    uint8_t *masks; /* of four rows of columns */
    double *wide;
    int64_t size; /* columns of a tile; 0 for long planes */
    int64_t channels, samples, run; /* of a tile; run: samples to sum before the sums move to float64 */
    int streams; /* as in Rows */
} Work;

enum { BUFFER = BLOCK + 64 };

static int start(Work *w, const Pass *p, int num, int64_t long_plane)
{
    const size_t size = p->loops->size;
    const int64_t N = p->n1 - p->n0;
    w->channels = at_most(at_least(COLUMNS / p->S, 1), p->c1 - p->c0);
    w->samples = w->channels < p->C ? 1 : at_most(at_least(BESIDE / (p->C * p->S), 1), at_least(N / 4, 1));
    w->run = w->samples * at_most(at_least(N / (RUN * w->samples), RUN), LONG_RUN);
    w->size = p->S >= long_plane ? 0 : w->channels * p->S * w->samples;
    const int64_t wide = 2 * w->size, line = 64 / size;
    const int64_t row = (p->C + 2 * line) / line * line, column = (w->size + 2 * line) / line * line;
    w->streams = 0;
#ifdef __SSE2__
    w->streams = !p->loops->widen && N * (p->c1 - p->c0) * p->S * (int64_t)size >= (p->out ? STREAMED : FAR);
#endif
    const int64_t buffers = p->loops->widen ? at_least(5 * BUFFER, 12 * w->size) : 0;
    w->memory = malloc((wide + buffers) * sizeof(double) + (num * (row + column) + 2 * column) * size + 64 +
                       4 * w->size + 16);
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
    w->masks = (uint8_t *)w->buffers + buffers * sizeof(double);
    set_coefficients(p, num, w->k);
    for (int i = 0; i < num; i++)
        memcpy(w->k[i] + p->C * size, w->k[i], at_most(p->C * size, 64));
    return 0;
}

/* Copy the coefficients of the channels a:b to each of their columns. */
static void spread(const Work *w, const Pass *p, int num, int64_t a, int64_t b, Rows *r)
{
    const size_t size = p->loops->size;
    for (int i = 0; i < num; i++) {
        const char *values = w->k[i] + a * size;
        r->k[i] = values;
        if (p->S == 1 && w->samples == 1)
            continue;
        r->k[i] = w->columns[i];
        int64_t j = 0;
        for (int64_t t = 0; t < w->samples; t++)
            for (int64_t c = 0; c < b - a; c++)
                for (int64_t s = 0; s < p->S; s++, j++)
                    if (size == sizeof(float))
                        ((float *)w->columns[i])[j] = ((const float *)values)[c];
                    else
                        ((double *)w->columns[i])[j] = ((const double *)values)[c];
        memcpy(w->columns[i] + j * size, w->columns[i], at_most(j * size, 64)); /* for rows that follow */
    }
}

/* Whether all bytes are 0; True may be any other byte. */
static int all_zero(const uint8_t *mask, int64_t n) { return !mask[0] && !memcmp(mask, mask + 1, n - 1); }

/* The mask of the sample n's planes, or of the columns of some samples and channels; NULL if all elements count. */
static const uint8_t *mask_of(const Pass *p, const Work *w, int64_t n, int64_t samples, int64_t channels)
{
    const uint8_t *from = p->mask + n * p->S;
    if (!p->mask || !memchr(from, 0, samples * p->S)) /* all count */
        return NULL;
    if (!w->size)
        return from;
    const int64_t row = channels * p->S;
    uint8_t *to = w->masks;
    for (int64_t t = 0; t < samples; t++, from += p->S, to += row)
        if (p->S == 1) { /* sixteen at a time: what is too much is the next sample's */
            typedef uint8_t Bytes __attribute__((vector_size(16)));
            const Bytes sixteen = (Bytes){0} + *from;
            for (int64_t c = 0; c < row; c += 16)
                memcpy(to + c, &sixteen, 16);
        } else {
            memcpy(to, from, p->S);
            int64_t done = p->S;
            for (; 2 * done < row; done *= 2)
                memcpy(to + done, to, done);
            memcpy(to + done, to, row - done);
        }
    return w->masks;
}

static const void *widened(const Loops *loops, const void *array, int64_t at, int64_t n, void *buffer)
{
    if (!array)
        return NULL;
    if (!loops->widen)
        return (const char *)array + at * loops->size;
    ask_ahead((const uint16_t *)array + at, (int)(n * sizeof(uint16_t)), 0);
    loops->widen((const uint16_t *)array + at, n, buffer);
    return buffer;
}

/* Run a loop over a row of memory, in blocks if the values have to be widened. */
static void run(const Pass *p, Work *w, const Rows *row, void (*loop)(const Rows *), int64_t at, int64_t planes,
                int64_t S)
{
    const Loops *l = p->loops;
    const size_t buffer_size = BUFFER * sizeof(double);
    Rows r = *row;
    const int blocks = l->widen != NULL;
    r.streams = w->streams;
    for (int64_t c = 0; c < planes; c += r.planes)
        for (int64_t i = 0; i < S; i += r.S) {
            r.planes = planes;
            r.S = S;
            if (blocks && S <= BLOCK)
                r.planes = at_most(planes - c, BLOCK / S);
            else if (blocks) {
                r.planes = 1;
                r.S = S - i < BUFFER ? S - i : BLOCK;
            }
            const int64_t here = at + c * S + i, n = r.planes * r.S;
            char *buffer = w->buffers;
            for (int j = 0; j < 5; j++)
                r.k[j] = row->k[j] ? (const char *)row->k[j] + c * l->size : NULL;
            if (row->mask)
                r.mask = row->mask + (S == 1 ? c : i);
            r.first = (double *)row->first + c;
            r.second = (double *)row->second + c;
            r.x = widened(l, p->x, here, n, buffer);
            r.dy = widened(l, p->dy, here, n, buffer + buffer_size);
            r.y = widened(l, p->y, here, n, buffer + 2 * buffer_size);
            r.out = blocks ? buffer + 3 * buffer_size : (char *)p->out + here * l->size;
            r.more = !p->more ? NULL : blocks ? buffer + 4 * buffer_size : (char *)p->more + here * l->size;
            loop(&r);
            if (blocks && p->out)
                l->narrow(r.out, n, (uint16_t *)p->out + here);
            if (blocks && p->more)
                l->narrow(r.more, n, (uint16_t *)p->more + here);
        }
}

static int elementwise(const Pass *p, int num)
{
    const int64_t C = p->C, S = p->S;
    Work w = {0};
    Rows r = {.kind = p->kind};
    if (start(&w, p, num, LONG))
        return -1;
    /* The last samples come first: the pass before has left these in the caches. */
    const int64_t together = at_least(CHUNK / (C * S * w.samples), 1) * w.samples;
    for (int64_t end = p->n1, begin; end > p->n0; end = begin) {
        begin = at_least(end - together, p->n0);
        for (int64_t a = p->c0, b; a < p->c1; a = b) {
            b = w.size ? at_most(a + w.channels, p->c1) : p->c1;
            if (w.size && (end == p->n1 || w.channels < p->c1 - p->c0))
                spread(&w, p, num, a, b, &r);
            for (int i = 0; i < num && !w.size; i++)
                r.k[i] = w.k[i] + a * p->loops->size;
            const int all_rows = w.size && b - a == C && !p->loops->widen;
            const int masked = p->mask && memchr(p->mask + begin * S, 0, (end - begin) * S);
            r.by_row = masked && all_rows && S == 1 && C >= LONG;
            for (int64_t n = begin, samples; n < end; n += r.rows * samples) {
                samples = w.size && !r.by_row ? at_most(end - n, w.samples) : 1;
                const int64_t row = w.size ? samples * (b - a) * S : b - a;
                r.rows = all_rows && row >= LONG && (!masked || r.by_row) ? (end - n) / samples : 1;
                r.mask = r.by_row ? p->mask + n : masked ? mask_of(p, &w, n, samples, b - a) : NULL;
                run(p, &w, &r, p->loops->write, (n * C + a) * S, row, w.size ? 1 : S);
            }
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* other threads see the non-temporal stores before this thread ends */
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
        for (int64_t n = p->n0; n < p->n1; n++) {
            r.mask = mask_of(p, &w, n, 1, 0);
            run(p, &w, &r, l->sums, (n * C + p->c0) * S, p->c1 - p->c0, S);
        }
        free(w.memory);
        return 0;
    }
    r.first = w.first;
    r.second = w.first + w.size * l->size;
    memset(w.first, 0, 2 * w.size * l->size);
    memset(w.wide, 0, 2 * w.size * sizeof(double));
    for (int64_t a = p->c0; a < p->c1; a += w.channels) {
        const int64_t b = at_most(a + w.channels, p->c1), row = (b - a) * S;
        spread(&w, p, num, a, b, &r);
        for (int64_t begin = p->n0; begin < p->n1; begin += w.run) {
            const int64_t end = at_most(begin + w.run, p->n1);
            for (int64_t n = begin, samples; n < end; n += r.rows * samples) {
                samples = at_most(w.samples, end - n);
                r.planes = samples * row;
                r.rows = n + 4 * samples <= end && r.planes >= LONG ? 4 : 1; /* fewer columns are copied */
                if (p->mask && all_zero(p->mask + n * S, r.rows * samples * S))
                    continue;
                r.stride = l->widen ? w.size : samples * C * S;
                r.next = l->widen ? 0 : n + r.rows * samples < p->n1 ? r.rows * r.stride : row - (n - p->n0) * C * S;
                r.mask = mask_of(p, &w, n, r.rows * samples, b - a);
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
        for (int64_t t = 0; t < w.samples; t++)
            for (int64_t c = a; c < b; c++) {
                double first = p->sums[c], second = p->sums[C + c];
                for (int64_t i = 0; i < S; i++, j++) {
                    first += w.wide[j];
                    second += w.wide[w.size + j];
                }
                p->sums[c] = first;
                p->sums[C + c] = second;
            }
        memset(w.wide, 0, 2 * w.size * sizeof(double));
    }
    free(w.memory);
    return 0;
}
