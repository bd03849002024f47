/* Launches of kernels on a GPU, which triton/prepared.py packs once, run by one call. */

enum { MOST_PARAMETERS = 40 };

/* A parameter is a number, or the value of a slot, which the caller of `run_launches` passes. */
typedef struct {
    int (*launch)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                  unsigned shared, void *stream, void **parameters, void **options); /* cuLaunchKernel */
    void *function;
    unsigned programs, threads, shared, num_parameters;
    int64_t slot[MOST_PARAMETERS]; /* -1: a number */
    uint64_t number[MOST_PARAMETERS];
} Launch;

/* Arguments: launches in bytes, a stream, and the values of the slots: numbers, or None if no launch reads the slot. */
static PyObject *py_run_launches(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    if (n < 2)
        return PyErr_Format(PyExc_TypeError, "launches and a stream are missing");
    const Launch *const all = (const Launch *)PyBytes_AsString(args[0]);
    void *const stream = PyLong_AsVoidPtr(args[1]);
    uint64_t value[MOST_PARAMETERS] = {0};
    for (Py_ssize_t i = 2; i < n && i - 2 < MOST_PARAMETERS; i++)
        if (args[i] != Py_None)
            value[i - 2] = PyLong_AsUnsignedLongLongMask(args[i]);
    if (PyErr_Occurred())
        return NULL;
    for (const Launch *l = all; l < all + PyBytes_Size(args[0]) / (Py_ssize_t)sizeof(Launch); l++) {
        uint64_t numbers[MOST_PARAMETERS];
        void *parameters[MOST_PARAMETERS];
        for (unsigned i = 0; i < l->num_parameters; i++) {
            numbers[i] = l->slot[i] < 0 ? l->number[i] : value[l->slot[i]];
            parameters[i] = &numbers[i];
        }
        const int error =
            l->launch(l->function, l->programs, 1, 1, l->threads, 1, 1, l->shared, stream, parameters, NULL);
        if (error)
            return PyErr_Format(PyExc_RuntimeError, "cuLaunchKernel failed with CUDA's error %d", error);
    }
    Py_RETURN_NONE;
}
