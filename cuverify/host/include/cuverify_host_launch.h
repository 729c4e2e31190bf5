// The door between Python and a kernel: CUVERIFY_EXPORT_KERNEL(name) exports a launcher that takes
// pointers to the arguments, and what the compiler knows of the parameters.
#pragma once

struct __nv_bfloat16;
struct __half;

namespace cuverify_host {

template <class T>
constexpr char kind_of() {
    using U = typename std::remove_cv<T>::type;
    if (std::is_void<U>::value) return 'v';
    if (std::is_same<U, bool>::value) return 'b';
    if (std::is_same<U, __half>::value) return 'h';
    if (std::is_same<U, __nv_bfloat16>::value) return 'B';
    if (std::is_pointer<U>::value) return 'p';
    if (std::is_floating_point<U>::value) return 'f';
    if (std::is_integral<U>::value) return std::is_signed<U>::value ? 'i' : 'u';
    return 's';
}

template <class T, bool = std::is_void<T>::value>
struct SizeOf {
    static constexpr unsigned value = sizeof(T);
};
template <class T>
struct SizeOf<T, true> {
    static constexpr unsigned value = 0;
};

template <class T>
constexpr ParameterInfo info_of() {
    if constexpr (std::is_pointer<T>::value) {
        using Pointee = typename std::remove_pointer<T>::type;
        return {sizeof(T), SizeOf<Pointee>::value, kind_of<Pointee>(), true,
                std::is_const<Pointee>::value};
    } else {
        return {sizeof(T), 0, kind_of<T>(), false, false};
    }
}

template <class... P>
int describe(void (*)(P...), ParameterInfo* to) {
    ParameterInfo all[sizeof...(P) + 1] = {info_of<P>()...};
    for (size_t i = 0; to && i < sizeof...(P); ++i) to[i] = all[i];
    return static_cast<int>(sizeof...(P));
}

template <class... P, size_t... I>
CUVERIFY_NO_CHECK void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    (void)arguments;
    kernel(*static_cast<typename std::remove_reference<P>::type*>(arguments[I])...);
}

template <class... P>
CUVERIFY_NO_CHECK int launch(void (*kernel)(P...), const LaunchConfig& config, void** arguments) {
    struct Call {
        void (*kernel)(P...);
        void** arguments;
    } what{kernel, arguments};
    return run(
        config,
        [](void* context) CUVERIFY_NO_CHECK {
            auto* c = static_cast<Call*>(context);
            call(c->kernel, c->arguments, std::index_sequence_for<P...>{});
        },
        &what);
}

}  // namespace cuverify_host

#define CUVERIFY_EXPORT_KERNEL(name)                                                \
    extern "C" __attribute__((visibility("default"))) int cuverify_launch_##name(   \
        const ::cuverify_host::LaunchConfig* config, void** arguments) {            \
        return ::cuverify_host::launch(name, *config, arguments);                   \
    }                                                                               \
    extern "C" __attribute__((visibility("default"))) int cuverify_describe_##name( \
        ::cuverify_host::ParameterInfo* to) {                                       \
        return ::cuverify_host::describe(name, to);                                 \
    }
