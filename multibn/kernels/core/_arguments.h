/* Arguments of functions for Python: the named tuples of arguments.py, whose fields are read by name, and arrays. */

#include "_locate.h"

/* The fields that the core reads, or knows to have no part in what the core computes. */
#define FIELDS(Input, Gradient, BatchStatistics, Running)                                              \
    Input(x) Input(weight) Input(bias) Input(eps) Input(axis) Input(residual) Input(relu)              \
        Input(running) Input(mask)                                                                     \
    Gradient(dy) Gradient(input) Gradient(batch) Gradient(y) Gradient(needs_dx)                        \
    BatchStatistics(mean) BatchStatistics(var) BatchStatistics(count) BatchStatistics(element_weight)  \
    Running(mean) Running(var) Running(momentum) Running(convention) Running(num_batches)

enum { INPUT_RECORD, GRADIENT_RECORD, BATCH_RECORD, RUNNING_RECORD, NUM_RECORDS };
enum { MAX_FIELDS = 64 };
#define OF_INPUT(name) Input_##name,
#define OF_GRADIENT(name) Gradient_##name,
#define OF_BATCH(name) Batch_##name,
#define OF_RUNNING(name) Running_##name,
enum { FIELDS(OF_INPUT, OF_GRADIENT, OF_BATCH, OF_RUNNING) NUM_FIELDS };
#define IN_INPUT(name) {#name, INPUT_RECORD},
#define IN_GRADIENT(name) {#name, GRADIENT_RECORD},
#define IN_BATCH(name) {#name, BATCH_RECORD},
#define IN_RUNNING(name) {#name, RUNNING_RECORD},

static struct {
    const char *const name;
    const int record;
    Py_ssize_t place; /* in the named tuple */
} fields[] = {FIELDS(IN_INPUT, IN_GRADIENT, IN_BATCH, IN_RUNNING)};

static struct {
    PyObject *type;
    Py_ssize_t size;
    int num_others; /* fields that the core does not know, and their defaults, NULL without one */
    Py_ssize_t others[MAX_FIELDS];
    PyObject *defaults[MAX_FIELDS];
} records[NUM_RECORDS];

/* The named tuples, in the order of the records. Finds the places of all fields. */
static PyObject *py_use_fields(PyObject *self, PyObject *args)
{
    (void)self;
    Py_INCREF(args); /* the types live as long as the process */
    for (int r = 0; r < NUM_RECORDS; r++) {
        PyObject *type = records[r].type = PyTuple_GetItem(args, r);
        PyObject *names = type ? PyObject_GetAttrString(type, "_fields") : NULL;
        PyObject *defaults = names ? PyObject_GetAttrString(type, "_field_defaults") : NULL; /* kept */
        const Py_ssize_t size = defaults ? PyTuple_Size(names) : -1;
        int is_known[MAX_FIELDS] = {0};
        if (size < 0 || size > MAX_FIELDS)
            return NULL;
        records[r].size = size;
        for (int f = 0; f < NUM_FIELDS; f++) {
            if (fields[f].record != r)
                continue;
            PyObject *name = PyUnicode_FromString(fields[f].name);
            const Py_ssize_t n = name ? PySequence_Index(names, name) : -1;
            Py_XDECREF(name);
            if (n < 0)
                return PyErr_Format(PyExc_TypeError, "%R must have a field `%s`, which the C core reads: got %R", type,
                                    fields[f].name, names);
            fields[f].place = n;
            is_known[n] = 1;
        }
        records[r].num_others = 0;
        for (Py_ssize_t n = 0; n < size; n++)
            if (!is_known[n]) {
                const int other = records[r].num_others++;
                records[r].others[other] = n;
                records[r].defaults[other] = PyDict_GetItemWithError(defaults, PyTuple_GetItem(names, n));
            }
        Py_DECREF(names);
    }
    Py_RETURN_NONE;
}

/* What all functions read of an `Input`. */
typedef struct {
    int64_t dtype;
    const void *x;
    int64_t N, C, S;
    const uint8_t *mask;
    int relu;
    int64_t threads; /* that may share the work */
} Input;

enum { TAKEN, NOT_TAKEN };

/* A call of a function. Once the call is not taken, no argument is read any more. */
typedef struct {
    Activation x;
    int state;
    const char *refused; /* the field of an array that could be copied, or NULL */
} Call;

static void refuse(Call *call, const char *field)
{
    if (call->state == NOT_TAKEN)
        return;
    call->state = NOT_TAKEN;
    call->refused = field;
}

/* Whether `tuple` is a record whose fields that the core does not know have their defaults. */
static int is_plain(Call *call, PyObject *tuple, int record)
{
    if (call->state == NOT_TAKEN)
        return 0;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != records[record].size) {
        PyErr_Format(PyExc_TypeError, "expected %R, got %R", records[record].type, (PyObject *)Py_TYPE(tuple));
        refuse(call, NULL);
    }
    for (int i = 0; i < records[record].num_others && call->state != NOT_TAKEN; i++) {
        PyObject *value = PyTuple_GetItem(tuple, records[record].others[i]), *usual = records[record].defaults[i];
        if (value != usual && (!usual || PyObject_RichCompareBool(value, usual, Py_EQ) != 1)) {
            PyErr_Clear(); /* arrays may refuse to be compared */
            refuse(call, NULL);
        }
    }
    return call->state != NOT_TAKEN;
}

/* A field of a record, which `is_plain` has looked at; borrowed. */
static PyObject *get_field(const Call *call, PyObject *record, int field)
{
    return call->state == NOT_TAKEN ? Py_None : PyTuple_GetItem(record, fields[field].place);
}

/* What an array must be for an argument. */
enum {
    LIKE_X,
    MASK,      /* of the memory order of x */
    CHANNELS,  /* numbers of the channels */
    AS_MANY,   /* as many numbers as channels, in any shape */
    WIDE,      /* float64 numbers of the channels */
    FORWARD,   /* a message */
    BACKWARD,
    ONE,       /* float64 number */
    COUNTER,   /* int64 number */
    WRITTEN = 16, /* to be added */
};

/* An array, or NULL for None; `field` is the name of an array that could be copied. */
static Parameter take(Call *call, PyObject *object, int kind, const char *field)
{
    const Activation *x = &call->x;
    const int64_t backward = 2 * x->sizes[1], forward = backward + NUM_SCALARS;
    Array a;
    int fits = 0;
    if (call->state == NOT_TAKEN || object == Py_None)
        return (Parameter){0};
    if (look(object, kind & WRITTEN, &a))
        switch (kind & ~WRITTEN) {
        case LIKE_X: fits = is_like(&a, &x->a); break;
        case MASK: fits = is_like(&a, &x->mask); break;
        case CHANNELS: fits = number_of(a.dtype) >= 0 && is_contiguous(&a, x->num_axes, x->channels); break;
        case AS_MANY:
            fits = number_of(a.dtype) >= 0 && is_contiguous(&a, a.ndim, a.shape) && length(&a) == x->sizes[1];
            break;
        case WIDE: fits = a.dtype == FLOAT64 && is_contiguous(&a, x->num_axes, x->channels); break;
        case FORWARD: fits = a.dtype == FLOAT64 && is_contiguous(&a, 1, &forward); break;
        case BACKWARD: fits = a.dtype == FLOAT64 && is_contiguous(&a, 1, &backward); break;
        case ONE: fits = a.dtype == FLOAT64 && !a.ndim; break;
        case COUNTER: fits = a.dtype == INT64 && !a.ndim;
        }
    if (!fits) {
        refuse(call, field);
        return (Parameter){0};
    }
    return (Parameter){a.data, number_of(a.dtype)};
}

/* A number, also in an array; -1 for None. */
static double number(Call *call, PyObject *object)
{
    Array a;
    if (call->state == NOT_TAKEN || object == Py_None)
        return -1;
    if (!PyFloat_Check(object) && look(object, 0, &a) && a.dtype == FLOAT64 && !a.ndim)
        return *(const double *)a.data;
    return PyFloat_AsDouble(object);
}

static int is_true(Call *call, PyObject *object) { return call->state != NOT_TAKEN && PyObject_IsTrue(object) == 1; }

static Input input(Call *call, PyObject *i)
{
    Activation *x = &call->x;
    if (!is_plain(call, i, INPUT_RECORD))
        return (Input){0};
    if (!look(get_field(call, i, Input_x), 0, &x->a) || number_of(x->a.dtype) < 0 ||
        !lay_out(x, get_field(call, i, Input_axis))) {
        refuse(call, "x");
        return (Input){0};
    }
    return (Input){
        .dtype = number_of(x->a.dtype), .x = x->a.data, .N = x->sizes[2], .C = x->sizes[1], .S = x->sizes[0],
        .mask = take(call, get_field(call, i, Input_mask), MASK, "mask").at,
        .relu = is_true(call, get_field(call, i, Input_relu)),
    };
}

/* What a pass reads beside the activations; `written` if a pass is to write mean and variance. */
static Statistics statistics(Call *call, PyObject *i, PyObject *batch, int written)
{
    const char *copied = written ? NULL : "batch";
    if (!is_plain(call, batch, BATCH_RECORD))
        return (Statistics){0};
    return (Statistics){
        .mean = take(call, get_field(call, batch, Batch_mean), WIDE | written, copied).at,
        .var = take(call, get_field(call, batch, Batch_var), WIDE | written, copied).at,
        .weight = take(call, get_field(call, i, Input_weight), CHANNELS, "weight"),
        .bias = take(call, get_field(call, i, Input_bias), CHANNELS, "bias"),
        .eps = number(call, get_field(call, i, Input_eps)),
    };
}

enum { BRIEF = 1 << 14 }; /* elements from which a pass lets other threads of Python run */

/* How many threads may share a pass over so many elements; -1, and an exception, if Python cannot tell. */
static int64_t num_threads(int64_t elements)
{
    PyObject *found = elements < 2 * SHARE ? NULL : PyObject_CallNoArgs(known.num_threads);
    const int64_t n = found ? PyLong_AsLongLong(found) : elements < 2 * SHARE ? 1 : -1;
    Py_XDECREF(found);
    return n;
}

/* A function for Python, of a record and other arguments, which `read_<name>` reads. Returns a number, or raises
MemoryError for one below 0. Otherwise nothing was done: the name of a field is the answer to an array that may be
copied, None to what the core cannot compute. A function works with 2 numbers per channel, and those of a sum. */
#define FUNCTION(name, Arguments, num_arguments)                                                          \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t num)                     \
    {                                                                                                     \
        Arguments a = {0};                                                                                \
        Call call = {.state = TAKEN};                                                                     \
        Input *i = (Input *)&a; /* the first of its arguments */                                          \
        int64_t number;                                                                                   \
        (void)self;                                                                                       \
        if (num != num_arguments)                                                                         \
            return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", num_arguments, num);   \
        read_##name(&call, args, &a);                                                                     \
        if (PyErr_Occurred())                                                                             \
            return NULL;                                                                                  \
        if (call.state == NOT_TAKEN)                                                                      \
            return call.refused ? PyUnicode_FromString(call.refused) : Py_NewRef(Py_None);                \
        if ((i->threads = num_threads(i->N * i->C * i->S)) < 0)                                           \
            return NULL;                                                                                  \
        PyThreadState *others = i->N * i->C * i->S >= BRIEF ? PyEval_SaveThread() : NULL;                 \
        double *memory = malloc((2 + 2 * parts_of(i->N, i->C, i->S)) * i->C * sizeof(double));            \
        number = memory ? name(LEVELS[level].loops + i->dtype, &a, memory) : -1;                          \
        free(memory);                                                                                     \
        if (others)                                                                                       \
            PyEval_RestoreThread(others);                                                                 \
        return number < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(number);                               \
    }
