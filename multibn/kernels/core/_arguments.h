/* Arguments of functions for Python. A function takes the fields of a struct, each 64 bits wide. A letter says what
each argument is:
    x       the activation; the next argument has the axes to reduce: dtype, address, N, C, S
    a       an activation like x
    m       a mask of the activation, in its memory order
    w       float64 numbers of the channels; Python may pass an address
    p       numbers of the channels: address, dtype
    f b     numbers of a forward or backward message
    s n     a float64 number; an int64 number
    c       which running variance, a word
    4 5     a task of so many numbers: zeros for None, with which a function takes the whole of x, unless that is large
    i d     a number; -1 for None
An array is NULL for None. A function writes to those in capitals. */

#include "_locate.h"

typedef struct {
    int64_t dtype;
    const void *x;
    int64_t N, C, S;
} Input;

enum { ERROR = -1, TAKEN, NOT_TAKEN, TOO_LARGE };

/* The address of an array of the kind of a letter, and its dtype; not taken if it is of another kind. */
static int take(PyObject *object, char letter, const Activation *x, void **at, int64_t *dtype)
{
    const int64_t backward = 2 * x->sizes[1], forward = backward + NUM_SCALARS;
    Array a;
    int fits = 0;
    *at = NULL;
    *dtype = 0;
    if (object == Py_None)
        return TAKEN;
    if (letter == 'w' && PyLong_Check(object)) {
        *at = PyLong_AsVoidPtr(object);
        return TAKEN;
    }
    if (!look(object, letter < 'a', &a))
        return NOT_TAKEN;
    switch (letter | 0x20) { /* in lower case */
    case 'a': fits = is_like(&a, &x->a); break;
    case 'm': fits = is_like(&a, &x->mask); break;
    case 'w': fits = a.dtype == FLOAT64 && is_contiguous(&a, x->num_axes, x->channels); break;
    case 'p': fits = number_of(a.dtype) >= 0 && is_contiguous(&a, x->num_axes, x->channels); break;
    case 'f': fits = a.dtype == FLOAT64 && is_contiguous(&a, 1, &forward); break;
    case 'b': fits = a.dtype == FLOAT64 && is_contiguous(&a, 1, &backward); break;
    case 's': fits = a.dtype == FLOAT64 && !a.ndim; break;
    case 'n': fits = a.dtype == INT64 && !a.ndim;
    }
    *at = a.data;
    *dtype = number_of(a.dtype);
    return fits ? TAKEN : NOT_TAKEN;
}

static int parse(PyObject *const *args, Py_ssize_t num, const char *letters, void *fields)
{
    const Py_ssize_t expected = strlen(letters) + 1;
    Activation x;
    int64_t *field = fields, dtype;
    int state = TAKEN, is_large = 0;
    if (num != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, num);
        return ERROR;
    }
    for (; *letters && state == TAKEN; letters++) {
        PyObject *arg = *args++;
        double v = -1;
        void *at;
        switch (*letters) {
        case 'x':
            if (!look(arg, 0, &x.a) || number_of(x.a.dtype) < 0 || !lay_out(&x, *args++))
                return PyErr_Occurred() ? ERROR : NOT_TAKEN;
            *(Input *)field = (Input){number_of(x.a.dtype), x.a.data, x.sizes[2], x.sizes[1], x.sizes[0]};
            field += sizeof(Input) / 8;
            break;
        case 'c':
            for (*field = 0; *field < NUM_CONVENTIONS && PyUnicode_Check(arg); ++*field)
                if (!PyUnicode_CompareWithASCIIString(arg, CONVENTIONS[*field]))
                    break;
            state = *field++ < NUM_CONVENTIONS ? TAKEN : NOT_TAKEN;
            break;
        case '4':
        case '5':
            is_large |= arg == Py_None && x.sizes[0] * x.sizes[1] * x.sizes[2] >= known.large;
            for (int i = 0; i < *letters - '0'; i++)
                *field++ = arg == Py_None ? 0 : PyLong_AsLongLong(PyTuple_GetItem(arg, i));
            break;
        case 'i': *field++ = PyLong_AsLongLong(arg); break;
        case 'd':
            if (!PyFloat_Check(arg) && !take(arg, 's', &x, &at, &dtype) && at)
                v = *(double *)at;
            else if (arg != Py_None)
                v = PyFloat_AsDouble(arg);
            memcpy(field++, &v, 8);
            break;
        default:
            state = take(arg, *letters, &x, (void **)field, &dtype);
            field++;
            if ((*letters | 0x20) == 'p')
                *field++ = dtype;
        }
    }
    return PyErr_Occurred() ? ERROR : state == TAKEN && is_large ? TOO_LARGE : state;
}

enum { BRIEF = 1 << 14 }; /* elements from which a pass lets other threads of Python run */

/* A function for Python. Returns a number, or MemoryError for one below 0; None if an argument is not as its letter
says; and, of an x that threads may share, (N, C, S). */
#define FUNCTION(name, Arguments, letters)                                                        \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t num)             \
    {                                                                                             \
        Arguments a;                                                                              \
        const Input *i = (const Input *)&a;                                                       \
        int64_t number;                                                                           \
        (void)self;                                                                               \
        const int state = parse(args, num, letters, &a);                                          \
        if (state == ERROR)                                                                       \
            return NULL;                                                                          \
        if (state == NOT_TAKEN)                                                                   \
            Py_RETURN_NONE;                                                                       \
        if (state == TOO_LARGE)                                                                   \
            return Py_BuildValue("LLL", (long long)i->N, (long long)i->C, (long long)i->S);       \
        PyThreadState *others = i->N * i->C * i->S >= BRIEF ? PyEval_SaveThread() : NULL;         \
        number = name(LEVELS[level].loops + i->dtype, &a);                                        \
        if (others)                                                                               \
            PyEval_RestoreThread(others);                                                         \
        return number < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(number);                       \
    }

