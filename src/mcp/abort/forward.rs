//! Forwards every [`ServerHandler`] method to the inner handler.
//!
//! A method missing from this list would fall back to its default body, so the inner handler would never receive its requests. A
//! test therefore checks the list against rmcp's source.

#![allow(
    deprecated,
    reason = "rmcp still serves deprecated requests, and the handler must receive those, too"
)]

use std::borrow::Cow;

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CancelTaskParams, CancelledNotificationParam,
        CompleteRequestParams, CompleteResult, CustomNotification, CustomRequest, CustomResult,
        DiscoverResult, GetPromptRequestParams, GetPromptResponse, GetSkillRequestParams,
        GetSkillResult, GetTaskParams, GetTaskResult, InitializeRequestParams, InitializeResult,
        ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListSkillsResult,
        ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, ProtocolVersion,
        ReadResourceDirectoryRequestParams, ReadResourceDirectoryResult, ReadResourceRequestParams,
        ReadResourceResponse, ServerConfig, SetLevelRequestParams, SubscribeRequestParams,
        SubscriptionFilter, Tool, UnsubscribeRequestParams, UpdateTaskParams,
    },
    service::{MaybeSendFuture, NotificationContext, RequestContext, SubscriptionContext},
};

use super::{AbortOnCancel, abortable_future::RequestInfo};

/// Implements the request methods, one per entry.
///
/// An entry consists of the mode (`abortable` or `protected`), the method with its parameters, its result, and its protocol name.
macro_rules! requests {
    ($($mode:ident $method:ident($($params:ty)?) -> $result:ty = $name:literal;)+) => {
        $(requests!(@ $mode $method($($params)?) -> $result = $name);)+
    };
    (@ $mode:ident $method:ident() -> $result:ty = $name:literal) => {
        fn $method(
            &self,
            context: RequestContext<RoleServer>,
        ) -> impl Future<Output = Result<$result, ErrorData>> + MaybeSendFuture + '_ {
            let request_info = RequestInfo::new(&context, $name);
            self.$mode(request_info, context, |handler, context| handler.$method(context))
        }
    };
    (@ $mode:ident $method:ident($params:ty) -> $result:ty = $name:literal) => {
        fn $method(
            &self,
            request: $params,
            context: RequestContext<RoleServer>,
        ) -> impl Future<Output = Result<$result, ErrorData>> + MaybeSendFuture + '_ {
            let request_info = RequestInfo::new(&context, $name);
            self.$mode(request_info, context, |handler, context| handler.$method(request, context))
        }
    };
}

/// Implements the notification methods, one per entry. They have no result.
macro_rules! notifications {
    ($($method:ident($($params:ty)?);)+) => {
        $(notifications!(@ $method($($params)?));)+
    };
    (@ $method:ident()) => {
        fn $method(
            &self,
            context: NotificationContext<RoleServer>,
        ) -> impl Future<Output = ()> + MaybeSendFuture + '_ {
            self.inner().$method(context)
        }
    };
    (@ $method:ident($params:ty)) => {
        fn $method(
            &self,
            notification: $params,
            context: NotificationContext<RoleServer>,
        ) -> impl Future<Output = ()> + MaybeSendFuture + '_ {
            self.inner().$method(notification, context)
        }
    };
}

impl<H: ServerHandler> ServerHandler for AbortOnCancel<H> {
    requests! {
        abortable complete(CompleteRequestParams) -> CompleteResult = "completion/complete";
        abortable discover() -> DiscoverResult = "server/discover";
        abortable get_prompt(GetPromptRequestParams) -> GetPromptResponse = "prompts/get";
        abortable get_skill(GetSkillRequestParams) -> GetSkillResult = "skills/get";
        abortable list_prompts(Option<PaginatedRequestParams>) -> ListPromptsResult = "prompts/list";
        abortable list_resource_templates(Option<PaginatedRequestParams>)
            -> ListResourceTemplatesResult = "resources/templates/list";
        abortable list_resources(Option<PaginatedRequestParams>)
            -> ListResourcesResult = "resources/list";
        abortable list_skills(Option<PaginatedRequestParams>) -> ListSkillsResult = "skills/list";
        abortable list_tools(Option<PaginatedRequestParams>) -> ListToolsResult = "tools/list";
        abortable read_resource(ReadResourceRequestParams)
            -> ReadResourceResponse = "resources/read";
        abortable read_resource_directory(ReadResourceDirectoryRequestParams)
            -> ReadResourceDirectoryResult = "resources/directory/read";
        protected cancel_task(CancelTaskParams) -> () = "tasks/cancel";
        protected get_task(GetTaskParams) -> GetTaskResult = "tasks/get";
        protected initialize(InitializeRequestParams) -> InitializeResult = "initialize";
        protected ping() -> () = "ping";
        protected set_level(SetLevelRequestParams) -> () = "logging/setLevel";
        protected subscribe(SubscribeRequestParams) -> () = "resources/subscribe";
        protected unsubscribe(UnsubscribeRequestParams) -> () = "resources/unsubscribe";
        protected update_task(UpdateTaskParams) -> () = "tasks/update";
    }

    fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> impl Future<Output = Result<CallToolResponse, ErrorData>> + MaybeSendFuture + '_ {
        let request_info = RequestInfo::new(&context, "tools/call").with_tool(&request.name);
        self.abortable(request_info, context, |handler, context| {
            handler.call_tool(request, context)
        })
    }

    fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleServer>,
    ) -> impl Future<Output = Result<CustomResult, ErrorData>> + MaybeSendFuture + '_ {
        let request_info = RequestInfo::new(&context, request.method.clone());
        self.abortable(request_info, context, |handler, context| {
            handler.on_custom_request(request, context)
        })
    }

    fn listen(
        &self,
        context: SubscriptionContext,
    ) -> impl Future<Output = Result<(), ErrorData>> + MaybeSendFuture + '_ {
        self.subscription(context, |handler, context| handler.listen(context))
    }

    notifications! {
        on_cancelled(CancelledNotificationParam);
        on_custom_notification(CustomNotification);
        on_initialized();
        on_progress(ProgressNotificationParam);
        on_roots_list_changed();
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        self.inner().accepted_subscription_filter(requested)
    }

    fn get_info(&self) -> ServerConfig {
        self.inner().get_info()
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.inner().get_tool(name)
    }

    fn negotiate_initialize(
        &self,
        request: &InitializeRequestParams,
    ) -> Result<InitializeResult, ErrorData> {
        self.inner().negotiate_initialize(request)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        self.inner().supported_protocol_versions()
    }
}
