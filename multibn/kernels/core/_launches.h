/* Launches of kernels on a GPU, prepared once and run many times by one call. The driver's library is looked up when
the first launch is prepared, so that this file needs no header of CUDA. */

#include <dlfcn.h>

enum { MOST_PARAMETERS = 40 };

typedef int (*LaunchKernel)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                            unsigned shared, void *stream, void **parameters, void **options);

/* A parameter is a number, or the value of a slot, which the caller of `run_launches` passes. */
typedef struct {
    void *function;
    unsigned programs, threads, shared;
    Py_ssize_t num_parameters;
    long slot[MOST_PARAMETERS]; /* -1: a number */
    uint64_t number[MOST_PARAMETERS];
} Launch;

typedef struct {
    LaunchKernel launch;
    Py_ssize_t length;
    Launch each[];
} Launches;

static void free_launches(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, "launches")); }

static int read_launch(Launch *l, PyObject *row)
{
    unsigned long long function;
    PyObject *slots, *numbers;
    if (!PyArg_ParseTuple(row, "KIIIO!O!", &function, &l->programs, &l->threads, &l->shared, &PyTuple_Type, &slots,
                          &PyTuple_Type, &numbers))
        return -1;
    l->function = (void *)(uintptr_t)function;
    l->num_parameters = PyTuple_Size(slots);
    if (l->num_parameters > MOST_PARAMETERS || PyTuple_Size(numbers) != l->num_parameters) {
        PyErr_Format(PyExc_ValueError, "a launch must have at most %d parameters", MOST_PARAMETERS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < l->num_parameters; i++) {
        l->slot[i] = PyLong_AsLong(PyTuple_GetItem(slots, i));
        l->number[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(numbers, i));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Arguments: one tuple (function, programs, threads, bytes of shared memory, slots, numbers) per launch. */
static PyObject *py_prepare_launches(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void *const launch = library ? dlsym(library, "cuLaunchKernel") : NULL;
    if (!launch) {
        PyErr_SetString(PyExc_OSError, "no cuLaunchKernel in libcuda.so.1");
        return NULL;
    }
    Launches *const all = PyMem_Calloc(1, sizeof(Launches) + (size_t)n * sizeof(Launch));
    if (!all)
        return PyErr_NoMemory();
    memcpy(&all->launch, &launch, sizeof launch); /* C has no cast from an object to a function */
    all->length = n;
    for (Py_ssize_t k = 0; k < n; k++)
        if (read_launch(&all->each[k], args[k])) {
            PyMem_Free(all);
            return NULL;
        }
    return PyCapsule_New(all, "launches", free_launches);
}

/* Arguments: the launches, a stream, and the values of the slots: numbers, or None if no launch reads the slot. */
static PyObject *py_run_launches(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    const Launches *const all = n < 2 ? NULL : PyCapsule_GetPointer(args[0], "launches");
    if (!all)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "launches and a stream are missing");
    void *const stream = PyLong_AsVoidPtr(args[1]);
    uint64_t value[MOST_PARAMETERS] = {0};
    for (Py_ssize_t i = 2; i < n && i - 2 < MOST_PARAMETERS; i++)
        if (args[i] != Py_None)
            value[i - 2] = PyLong_AsUnsignedLongLongMask(args[i]);
    if (PyErr_Occurred())
        return NULL;
    for (Py_ssize_t k = 0; k < all->length; k++) {
        const Launch *const l = &all->each[k];
        uint64_t numbers[MOST_PARAMETERS];
        void *parameters[MOST_PARAMETERS];
        for (Py_ssize_t i = 0; i < l->num_parameters; i++) {
            numbers[i] = l->slot[i] < 0 ? l->number[i] : value[l->slot[i]];
            parameters[i] = &numbers[i];
        }
        const int error =
            all->launch(l->function, l->programs, 1, 1, l->threads, 1, 1, l->shared, stream, parameters, NULL);
        if (error)
            return PyErr_Format(PyExc_RuntimeError, "cuLaunchKernel failed with CUDA's error %d", error);
    }
    Py_RETURN_NONE;
}
